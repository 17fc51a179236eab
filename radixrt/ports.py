"""Ports of this machine: bound for HTTP, kept for those who share one, free ones for ZMQ."""

from __future__ import annotations

import socket


def bind_http(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """A socket bound to a port (0: a free one) for HTTP; `shared` with others that are, too. OSError if another has
    it."""
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(shared))
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise OSError(error.errno, f"cannot listen on {host}:{port}: {error.strerror}") from None
    return bound


def keep_port(host: str, port: int) -> socket.socket:
    """A socket, which does not listen, that keeps a port (0: a free one) for those who share it. OSError if anybody has
    it, also one who would share it."""
    with bind_http(host, port) as alone:
        port = alone.getsockname()[1]
    kept = bind_http(host, port, shared=True)
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)  # else others could bind it before anybody listens
    return kept


def free_tcp_address() -> str:
    """A ZMQ address on a port of this machine that nobody listens on now, and that nobody else is given for a minute.

    A connection that was closed here keeps its port for that time: who asks for that port gets it (with SO_REUSEADDR,
    as ZMQ and web servers have it), who asks for any port gets another.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        address, port = server.getsockname()
        with socket.create_connection((address, port)):
            server.accept()[0].close()  # the side that closes first waits
    return f"tcp://{address}:{port}"
