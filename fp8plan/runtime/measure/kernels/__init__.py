"""Single kernels, timed."""
