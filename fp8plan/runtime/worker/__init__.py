"""New weights into the live engine: the side inside vLLM's worker."""
