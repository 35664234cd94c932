"""Kernels compiled and interpreted without a GPU: `make show-kernels`."""
