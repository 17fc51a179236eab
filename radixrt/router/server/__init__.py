"""The router's sockets and tasks around its core, which makes the decisions."""
