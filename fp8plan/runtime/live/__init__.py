"""What runs inside vLLM's workers: where tensors go in a live model, and how they are written and checked there."""
