"""What a GPU runs: fused kernels, attention over pages by work lists, CUDA graphs, and the runner of all that."""
