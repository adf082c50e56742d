"""The speed guard: what was seen, what was predicted, why they differ, what to do."""
