"""An exact simulation of vLLM V1's scheduler: the work of every step."""
