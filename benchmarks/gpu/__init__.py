"""Measurements on a GPU that no profile needs: weight sync, its kernels, the correction; and what made their models."""
