"""Sums over the GPUs of a tensor-parallel group."""
