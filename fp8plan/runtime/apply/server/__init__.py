"""An engine inside `vllm serve`, synced by any client of vLLM's own weight-transfer lifecycle."""
