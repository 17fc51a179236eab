"""Pages and recurrent states in pinned host memory."""
