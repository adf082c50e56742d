"""Whether the predicted speed arrives: what was seen, what was predicted, why they differ, what to do."""
