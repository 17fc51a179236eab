"""Makes a runner: what a checkpoint and the device decide, and how large the pools are."""
