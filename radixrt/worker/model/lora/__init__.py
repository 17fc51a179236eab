"""LoRA adapters in a model."""
