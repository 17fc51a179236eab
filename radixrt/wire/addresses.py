"""Addresses of sockets: tcp://HOST:PORT, ipc://PATH or inproc://NAME.

An address to connect to may end in `#` and 64 hex digits, the CURVE public key of the server
(`tcp://10.0.0.7:5555#0a1b...`), or in `#plain:` and the password of one that has no key, but asks for that.
"""

from __future__ import annotations

import ipaddress
import socket
from typing import NamedTuple

MAX_IPC_PATH = 107
MAX_PORT = 65_535
PASSWORD = "plain:"


class Address(NamedTuple):
    """An address of ZMQ, and what a server there asks for: its public key, a password (or neither)."""

    endpoint: str
    key: bytes | None = None
    password: str = ""


def split_address(address: str) -> Address:
    """Split `tcp://HOST:PORT#KEY`. Raises ValueError if it is not valid."""
    endpoint, mark, key = address.partition("#")
    transport, sep, place = endpoint.partition("://")
    if not sep or transport not in ("tcp", "ipc", "inproc") or not place:
        raise ValueError(f"address {address!r}: expected tcp://HOST:PORT, ipc://PATH or inproc://NAME")
    if transport == "tcp":
        host, _, port = place.rpartition(":")
        if not host:
            raise ValueError(f"address {address!r}: tcp needs HOST:PORT")
        if port != "*" and not (port.isascii() and port.isdigit() and int(port) <= MAX_PORT):
            raise ValueError(f"address {address!r}: a port is a number up to {MAX_PORT}")
    if transport == "ipc" and len(place.encode()) > MAX_IPC_PATH:
        raise ValueError(f"address {address!r}: an ipc path may have {MAX_IPC_PATH} bytes, this one has more")
    if not mark:
        return Address(endpoint)
    if key.startswith(PASSWORD):
        return Address(endpoint, password=key.removeprefix(PASSWORD))
    try:
        raw = bytes.fromhex(key)
    except ValueError:
        raw = b""
    if len(raw) != 32:
        raise ValueError(f"address {endpoint}#...: a public key is 64 hex digits")
    return Address(endpoint, raw)


def check_shared(address: str, *, listens: bool = False) -> None:
    """Raise ValueError for an address that cannot connect processes: inproc, or TCP without a port (which is allowed
    for a socket that `listens`)."""
    transport, _, place = split_address(address).endpoint.partition("://")
    if transport == "inproc":
        raise ValueError(f"address {address!r}: no other process reaches it; expected tcp://HOST:PORT or ipc://PATH")
    if transport == "tcp" and not listens and place.rpartition(":")[2].strip("0") in ("", "*"):
        raise ValueError(f"address {address!r}: expected a port from 1 to {MAX_PORT}")


def is_loopback(address: str) -> bool:
    """Whether only this machine can connect: ipc, inproc, and TCP on 127.0.0.0/8, ::1 or localhost."""
    transport, _, place = split_address(address).endpoint.partition("://")
    if transport != "tcp":
        return True
    host = place.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_served(path: str) -> bool:
    """Whether a process listens on an ipc path. (If it does, a bind of ZMQ would replace its socket.)"""
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(path.replace("@", "\0", 1) if path.startswith("@") else path) == 0
