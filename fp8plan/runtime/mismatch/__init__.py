"""Log-probs of trainer and rollout -> how far they differ, in one pass."""
