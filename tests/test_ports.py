from __future__ import annotations

import socket

import pytest

from radixrt.process.ports import _first_of_connections, free_tcp_address


def test_addresses_are_nobody_elses():
    """Neither another's who asked for one, nor a connection's."""
    ports = [int(free_tcp_address().rpartition(":")[2]) for _ in range(200)]
    assert len(set(ports)) == len(ports) and max(ports) < _first_of_connections()
    for port in ports[:5]:
        with pytest.raises(OSError), socket.socket() as other:
            other.bind(("127.0.0.1", port))
        with socket.create_server(("127.0.0.1", port)):  # as servers do, with SO_REUSEADDR
            pass
