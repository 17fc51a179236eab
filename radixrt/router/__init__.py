"""The router process: it owns client connections, tokenization, the index of what workers have cached, and placement.

`core` makes all decisions and has no sockets; `loop` has the sockets and makes no decisions.
"""
