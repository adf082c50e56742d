"""vLLM V1's scheduler, simulated exactly: which step does what."""
