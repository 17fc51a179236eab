"""`make demo`: an agent on two CPU workers, a chat over HTTP, the hit-rate report."""
