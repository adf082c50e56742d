"""Data-parallel replicas of one engine, as Ray actors."""
