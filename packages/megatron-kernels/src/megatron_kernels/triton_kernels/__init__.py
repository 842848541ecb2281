"""Triton kernels and the functions that launch them. Only `TritonOp` imports these modules."""
