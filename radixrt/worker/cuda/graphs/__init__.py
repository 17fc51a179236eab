"""CUDA graphs: of whole decode steps, and of everything but attention."""
