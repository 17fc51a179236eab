"""Kernels of layers with recurrent states."""
