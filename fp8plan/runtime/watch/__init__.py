"""Measure the mismatch, correct for it, set thresholds and judge rollouts: without an engine."""
