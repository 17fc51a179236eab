"""Functions that open, bind and connect ZMQ sockets."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

import zmq

from radixrt.wire.addresses import is_loopback, is_served, split_address

HIGH_WATER = 10_000
"""The most messages that are queued for a peer that does not read; further sends fail."""
NOW, NOW_AND_MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
READABLE, WRITABLE = int(zmq.POLLIN), int(zmq.POLLOUT)
"""Plain ints: to combine Python's enum flags takes half a microsecond."""
ZAP_DOMAIN = "radixrt"
"""Of sockets that listen. With one, ZMQ refuses the protocols before ZMTP 3, which begin with any bytes: to ZMTP 1.0 a
request that a web page makes a browser send is a series of messages. That needs no handler (RFC 27, see
`ZapHandler`)."""
HANDLER = "inproc://zeromq.zap.01"
"""Where ZMQ looks for a handler."""
USER = b"radixrt"
"""The name that goes with a password; it says nothing."""

Key = tuple[bytes, bytes]
"""The (secret, public) CURVE keys of a socket that listens, in Z85."""


def open_socket(kind: int = zmq.DEALER) -> zmq.Socket[bytes]:
    """A new socket, neither connected nor bound."""
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    socket.linger = 0
    socket.sndhwm = HIGH_WATER
    socket.rcvhwm = HIGH_WATER
    # A peer that vanishes without a FIN (cable, power) is noticed within a minute.
    socket.heartbeat_ivl, socket.heartbeat_timeout = 15_000, 45_000
    return socket


def bind(socket: zmq.Socket, address: str, key: Key | None = None, *, domain: str = "") -> str:
    """Listen on an address, for peers that know the public `key`, or a password that a handler knows for the `domain`.
    Returns the address, with the port that ZMQ has chosen for `*`. Raises ValueError for an invalid one, or one that
    other machines can reach if there is no `key`, and OSError if it is in use."""
    endpoint = split_address(address).endpoint
    socket.ipv6 = "[" in endpoint
    if key is None and not is_loopback(address):
        raise ValueError(
            f"{endpoint} can be reached from other machines: that needs --curve-secret-key (radixrt keygen)"
        )
    socket.set_string(zmq.ZAP_DOMAIN, domain or ZAP_DOMAIN)
    if key is not None:
        socket.curve_secretkey, socket.curve_publickey = key
        socket.curve_server = True
    elif domain:
        socket.plain_server = True
    if endpoint.startswith("ipc://") and is_served(endpoint.removeprefix("ipc://")):
        raise OSError(errno.EADDRINUSE, f"cannot listen on {endpoint}: {os.strerror(errno.EADDRINUSE)}")
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        why = error.strerror.partition(" (addr=")[0]
        raise OSError(error.errno, f"cannot listen on {endpoint}: {why}") from None
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)


def ignore_identities(socket: zmq.Socket) -> None:
    """From now on, a ROUTER that listens numbers its connections itself.

    By default it knows a peer by what that calls itself, and numbers only those that say nothing: anybody could take
    the identity of another peer, whose replies he would get (with `router_handover`, or before the other connects
    again), or the next number, which makes libzmq abort the process. For "raw" connections a ROUTER reads no identity;
    those to which it listens already stay what they are, as options concern only what is bound after them. To send an
    empty frame now closes a connection; no message is empty.
    """
    socket.setsockopt(zmq.ROUTER_RAW, 1)


def connect(socket: zmq.Socket, address: str) -> None:
    """Connect to an address, with the public key or the password in it, if there is one. Raises ValueError if it is not
    valid."""
    endpoint, server_key, password = split_address(address)
    socket.ipv6 = "[" in endpoint
    if server_key is not None:
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
        socket.curve_serverkey = server_key
    elif password:
        socket.plain_username, socket.plain_password = USER, password.encode()
    try:
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        raise ValueError(f"address {endpoint}: {error.strerror}") from None


def connect_again(socket: zmq.Socket, address: str) -> None:
    """Drop the connection to an address, with the messages that wait to be sent, and connect again."""
    endpoint = address.partition("#")[0]
    socket.disconnect(endpoint)
    socket.connect(endpoint)


def is_readable(socket: zmq.Socket, milliseconds: int = 0) -> bool:
    """Whether there is a message, waiting up to `milliseconds` for it (-1: no limit). Polling first costs a third of
    zmq.Again being raised by a receive; pyzmq's own `poll` methods are slower, as they use enums."""
    return bool(zmq.zmq_poll([(socket, READABLE)], milliseconds))


def plain_send(socket: zmq.Socket) -> Callable[..., None]:
    """The base class's `send`, which omits what pyzmq's Python wrapper does for ZMQ's draft socket types."""
    return super(zmq.Socket, socket).send
