"""One call per training step: mismatch, thresholds, correction, record."""
