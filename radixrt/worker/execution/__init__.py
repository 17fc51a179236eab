"""Runs plans: a model's steps, sampling, and the pools on the device."""
