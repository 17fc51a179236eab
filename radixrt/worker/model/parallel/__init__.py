"""A model's share of each rank of a tensor-parallel group."""
