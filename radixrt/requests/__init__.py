"""Checks requests, before anything is computed for them. Pure."""
