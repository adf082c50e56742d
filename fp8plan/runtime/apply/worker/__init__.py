"""Syncs of new weights into a live engine: the side inside vLLM's worker."""
