"""Weights and masks that correct the gradient for the mismatch."""
