"""The mismatch between the log-probs of trainer and rollout, measured in one pass."""
