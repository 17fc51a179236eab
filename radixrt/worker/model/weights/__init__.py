"""Reads a decoder's weights from a checkpoint."""
