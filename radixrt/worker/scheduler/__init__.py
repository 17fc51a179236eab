"""Decides which tokens each step computes."""
