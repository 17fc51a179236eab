"""Tensor parallelism: one process for each GPU."""
