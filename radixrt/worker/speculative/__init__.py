"""Draft tokens, and what drafting costs and saves."""
