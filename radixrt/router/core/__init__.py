"""The router's decisions: a state machine without sockets, threads or clocks."""
