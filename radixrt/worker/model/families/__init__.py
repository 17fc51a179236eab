"""Model families, one file each, named as the checkpoint's `model_type`."""
