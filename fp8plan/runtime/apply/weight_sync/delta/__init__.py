"""Lossless sparse syncs: only the values that a step of training has changed are sent."""
