"""vLLM's plan of the KV cache: from what each layer keeps to groups, blocks and tokens."""
