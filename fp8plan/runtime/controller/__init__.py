"""The laws that adapt the thresholds of the correction."""
