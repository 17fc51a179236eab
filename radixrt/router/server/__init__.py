"""The router's process: its sockets, its loop, and what it shows of itself."""
