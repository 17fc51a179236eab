"""Ports of this machine: bound for HTTP, kept for those who share one, free ones for ZMQ."""

from __future__ import annotations

import errno
import random
import socket
from pathlib import Path

from radixrt.config import FrontendConfig
from radixrt.wire.addresses import is_loopback

PORTS = 8192
"""Ports of which `free_tcp_address` chooses one."""


def check_host(config: FrontendConfig) -> None:
    """Raise ValueError if a front end would listen beyond loopback without API keys."""
    if not config.api_key and not is_loopback(f"tcp://{config.host or '*'}:0"):
        raise ValueError(f"--host {config.host}: other machines can reach it, so it needs --api-key")


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
        raise cannot_listen(error, host, port) from None
    return bound


def cannot_listen(error: OSError, host: str, port: int) -> OSError:
    """The same error with the address, and with what to do."""
    hint = "; --port takes another one (0: a free one)" if error.errno == errno.EADDRINUSE else ""
    return OSError(error.errno, f"cannot listen on {host}:{port}: {error.strerror}{hint}")


def keep_port(host: str, port: int) -> socket.socket:
    """A socket, which does not listen, that keeps a port (0: a free one) for those who share it. OSError if anybody has
    it, also one who would share it."""
    with bind_http(host, port) as alone:
        port = alone.getsockname()[1]
    kept = bind_http(host, port, shared=True)
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)  # else others could bind it before anybody listens
    return kept


def free_tcp_address() -> str:
    """A ZMQ address on a port of this machine that nobody has now, and that nobody else is given here for a minute.

    It is below the ports that connections get by themselves: one of these may be a connection's own at any time. And a
    connection that was closed here keeps its port for that time: who binds it gets it with SO_REUSEADDR, as ZMQ and web
    servers have it, and without, as here, gets an error.
    """
    last = _first_of_connections()
    for port in random.Random().sample(range(last - PORTS, last), PORTS):
        with socket.socket() as server:
            try:
                server.bind(("127.0.0.1", port))
            except OSError:
                continue
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # of the connection that waits, too
            server.listen()
            with socket.create_connection(("127.0.0.1", port)):
                server.accept()[0].close()  # the side that closes first waits
            return f"tcp://127.0.0.1:{port}"
    raise OSError(f"no port from {last - PORTS} to {last - 1} is free")


def _first_of_connections() -> int:
    """The first of the ports that the system gives to connections."""
    try:
        first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError):
        return 32768
    return max(first, 1024 + PORTS)
