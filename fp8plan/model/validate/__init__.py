"""Predictions against measured rollouts."""
