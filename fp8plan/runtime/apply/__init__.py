"""Run the plan: the engine, its quantisation, and the sync of its weights."""
