"""What is read of a checkpoint's folder without torch, by routers and workers."""
