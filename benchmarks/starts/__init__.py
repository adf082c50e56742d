"""Which planned engines start, on which attention kernel: vLLM's own configuration, layers and CUDA graphs, asked on a
CPU for GPUs that are not there."""
