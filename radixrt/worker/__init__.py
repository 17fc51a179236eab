"""A worker: one model on one device. Scheduler and page accounting hold ints; tensors begin at the runner."""
