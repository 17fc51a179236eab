"""Kernels that choose tokens from logits."""
