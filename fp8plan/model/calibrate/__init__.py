"""Measurements -> a profile, and how wrong it is on what it was not fitted to."""
