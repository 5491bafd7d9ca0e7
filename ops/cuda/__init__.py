"""Triton kernels for CUDA, and what their weights look like. Imported by the first call on a GPU."""
