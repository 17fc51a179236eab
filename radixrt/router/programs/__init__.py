"""Programs' states: prompts of which a client sends only what is new."""
