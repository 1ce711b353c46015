"""Attention over 8 to 64 GPUs, simulated from kernels timed on one; see `scaling.__main__`."""
