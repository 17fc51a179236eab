"""Fused kernels over the elements of rows, and how kernels get their inputs."""
