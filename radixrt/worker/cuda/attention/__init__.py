"""Paged attention on GPUs, by work lists."""
