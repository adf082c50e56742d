"""The shapes at which kernels are timed."""
