"""The demonstration (`make demo`): an agent on two CPU workers, a chat over HTTP, and the hit-rate report."""
