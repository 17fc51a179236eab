"""A ZMQ socket, opened, bound to an address or connected to one."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

import zmq

from radixrt.wire.addresses import is_loopback, is_served, split_address

HIGH_WATER = 10_000
"""Messages queued for one peer that does not read, before sends to it are refused."""
NOW, NOW_AND_MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
READABLE, WRITABLE = int(zmq.POLLIN), int(zmq.POLLOUT)
"""Plain numbers: Python's flags take half a microsecond to combine."""


def open_socket(kind: int = zmq.DEALER) -> zmq.Socket:
    """One that is not connected, nor bound, yet."""
    socket = zmq.Context.instance().socket(kind)
    socket.linger = 0
    socket.sndhwm = HIGH_WATER
    socket.rcvhwm = HIGH_WATER
    # A peer that vanished without a FIN (cable, power) is noticed within a minute.
    socket.heartbeat_ivl, socket.heartbeat_timeout = 15_000, 45_000
    return socket


def bind(socket: zmq.Socket, address: str, key: tuple[bytes, bytes] | None) -> str:
    """Where it listens then. ValueError for a bad address, or one that other machines reach without a `key`; OSError
    when it is taken."""
    endpoint, _ = split_address(address)
    socket.ipv6 = "[" in endpoint
    if key is None and not is_loopback(address):
        raise ValueError(
            f"{endpoint} can be reached from other machines: that needs --curve-secret-key (radixrt keygen)"
        )
    if key is not None:
        socket.curve_secretkey, socket.curve_publickey = key
        socket.curve_server = True
    if endpoint.startswith("ipc://") and is_served(endpoint.removeprefix("ipc://")):
        raise OSError(errno.EADDRINUSE, f"cannot listen on {endpoint}: {os.strerror(errno.EADDRINUSE)}")
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise OSError(error.errno, f"cannot listen on {endpoint}: {error.strerror}") from None
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)


def connect(socket: zmq.Socket, address: str) -> None:
    """ValueError for a bad address."""
    endpoint, server_key = split_address(address)
    socket.ipv6 = "[" in endpoint
    if server_key is not None:
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
        socket.curve_serverkey = server_key
    try:
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        raise ValueError(f"address {endpoint}: {error.strerror}") from None


def connect_again(socket: zmq.Socket, address: str) -> None:
    """Drop the connection to an address, and what waits to be sent there; make another."""
    endpoint = address.partition("#")[0]
    socket.disconnect(endpoint)
    socket.connect(endpoint)


def is_readable(socket: zmq.Socket, milliseconds: int = 0) -> bool:
    """Whether a message is there, or comes within that time (-1: any). To ask costs a third of what ZMQ's exception
    does, and pyzmq's own ways to ask go through an Enum first."""
    return bool(zmq.zmq_poll([(socket, READABLE)], milliseconds))


def plain_send(socket: zmq.Socket) -> Callable[..., None]:
    """The `send` of `socket` without what pyzmq does before it for sockets that ZMQ has in draft."""
    return super(zmq.Socket, socket).send
