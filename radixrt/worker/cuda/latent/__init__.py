"""Kernels of latent attention, and of sparse attention over latents."""
