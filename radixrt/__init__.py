"""radixrt serves language models to agents: every token prefix is computed once."""

__version__ = "0.1.0"
