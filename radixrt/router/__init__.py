"""The process that owns clients, tokens, the index of what workers have cached, and placement.

`core` decides and has no sockets; `loop` has the sockets and decides nothing.
"""
