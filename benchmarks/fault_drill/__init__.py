"""A drill of faults in weight syncs: after each the engine serves old or new weights whole, or refuses and says why."""
