"""Triton kernels for CUDA and the layouts of their weights, imported by the first call on a GPU."""
