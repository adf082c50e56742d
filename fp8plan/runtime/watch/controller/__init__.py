"""The laws that decide the thresholds of the correction."""
