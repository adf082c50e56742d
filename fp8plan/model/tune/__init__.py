"""Search of the engine's limits, and what the levers of a trainer would gain."""
