"""Matrix products of linear layers: BF16, FP8, INT4, LoRA."""
