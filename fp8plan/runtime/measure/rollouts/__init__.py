"""Rollouts of real engines, timed and traced."""
