"""What needs torch, vLLM or a GPU. Both are imported inside functions, so that importing this loads neither."""
