"""The planned engines that start, and their attention kernels, by vLLM's own configuration, layers and CUDA graphs.

They are asked on a CPU, for GPUs that are not there.
"""
