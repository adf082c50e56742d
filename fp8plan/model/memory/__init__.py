"""GPU memory of one vLLM rank, and its KV cache."""
