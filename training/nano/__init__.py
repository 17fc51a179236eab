"""A small model that does agent work: its tasks, its tokenizer, its training and its figures."""
