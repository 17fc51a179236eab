"""The socket layer, the only file that imports zmq: messages in, messages out, no policy.

    DealerSocket (client, front end)  --tcp/ipc/inproc-->  RouterSocket (router, clients' side)
    Link         (worker's thread)    --tcp/ipc/inproc-->  RouterSocket (router, workers' side)

A ROUTER/DEALER message is `[identity,] payload`; a payload is the msgpack of one tagged union of
`radixrt.messages`. Every process has one ZMQ context, so that `inproc://` joins threads of a process.

An address may end in `#` and 64 hex digits: the CURVE public key of the server to connect to
(`tcp://10.0.0.7:5555#0a1b...`). `radixrt keygen` makes the keys. Nobody who does not know that key can
connect, and one secret gives the clients' and the workers' socket different keys.
"""

from __future__ import annotations

import abc
import asyncio
import errno
import hashlib
import ipaddress
import os
import secrets
import socket as sockets
from collections.abc import Callable
from pathlib import Path
from typing import Self

import msgspec
import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

Decoder = msgspec.msgpack.Decoder
Malformed = msgspec.MsgspecError
"""What `Decoder.decode` raises for bytes that are no message of its union."""
encode = msgspec.msgpack.Encoder().encode

HIGH_WATER = 10_000
"""Messages queued for one peer that does not read, before sends to it are refused."""
MAX_CLIENT_BYTES = 64 << 20
"""Largest message taken from a client; ZMQ drops the connection of one that sends more."""
MAX_IPC_PATH = 107
MOST_PORT = 65_535
_BATCH = 512
"""Messages handled before other callbacks of the event loop get their turn."""
_NOW, _NOW_AND_MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
_READABLE = int(zmq.POLLIN)
"""Plain numbers: Python's flags take half a microsecond to combine."""


class PeerGone(ConnectionError):
    """A message could not be sent, because nobody with that identity is connected."""


# ---------------------------------------------------------------- addresses and keys


def split_address(address: str) -> tuple[str, bytes | None]:
    """`tcp://host:port#hexkey` -> ZMQ address, public key (z85) or None. ValueError names what is wrong."""
    endpoint, mark, key = address.partition("#")
    transport, sep, place = endpoint.partition("://")
    if not sep or transport not in ("tcp", "ipc", "inproc") or not place:
        raise ValueError(f"address {address!r}: expected tcp://HOST:PORT, ipc://PATH or inproc://NAME")
    if transport == "tcp":
        host, _, port = place.rpartition(":")
        if not host:
            raise ValueError(f"address {address!r}: tcp needs HOST:PORT")
        if port != "*" and not (port.isascii() and port.isdigit() and int(port) <= MOST_PORT):
            raise ValueError(f"address {address!r}: a port is a number up to {MOST_PORT}")
    if transport == "ipc" and len(place.encode()) > MAX_IPC_PATH:
        raise ValueError(f"address {address!r}: an ipc path may have {MAX_IPC_PATH} bytes, this one has more")
    if not mark:
        return endpoint, None
    try:
        raw = bytes.fromhex(key)
    except ValueError:
        raw = b""
    if len(raw) != 32:
        raise ValueError(f"address {endpoint}#...: a public key is 64 hex digits")
    return endpoint, z85.encode(raw)


def check_shared(address: str, *, listens: bool = False) -> None:
    """ValueError unless processes can meet at an address: it is none of a process alone and, but for who `listens`,
    names a port."""
    endpoint, _ = split_address(address)
    transport, _, place = endpoint.partition("://")
    if transport == "inproc":
        raise ValueError(f"address {address!r}: no other process reaches it; expected tcp://HOST:PORT or ipc://PATH")
    if transport == "tcp" and not listens and place.rpartition(":")[2].strip("0") in ("", "*"):
        raise ValueError(f"address {address!r}: expected a port from 1 to {MOST_PORT}")


def is_loopback(address: str) -> bool:
    """True where only this machine can connect: ipc, inproc, and tcp on 127.0.0.0/8, ::1 or localhost."""
    transport, _, place = split_address(address)[0].partition("://")
    if transport != "tcp":
        return True
    host = place.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def make_secret_key(path: str) -> None:
    """Write a new CURVE secret key, 64 hex digits, readable by its owner only. FileExistsError if there is one."""
    file = Path(path)
    file.touch(mode=0o600, exist_ok=False)
    file.write_text(secrets.token_hex(32) + "\n")


def load_secret_key(path: str, role: str) -> tuple[bytes, bytes]:
    """(secret, public), z85, of `role` ("clients" or "workers"), derived so that a client's key opens no worker socket.

    ValueError if the file is not 64 hex digits; OSError if it cannot be read."""
    try:
        root = bytes.fromhex(Path(path).read_text().strip())
    except ValueError:
        root = b""
    if len(root) != 32:
        raise ValueError(f"curve_secret_key: {path} is not a key file made by `radixrt keygen`")
    secret = z85.encode(hashlib.blake2b(root, digest_size=32, person=role.encode()).digest())
    return secret, zmq.curve_public(secret)


def is_private(path: str) -> bool:
    """Whether nobody but its owner can read a file."""
    return not Path(path).stat().st_mode & 0o077


def public_suffix(path: str, role: str) -> str:
    """What to append to the address of the socket of `role` to connect to it: `#` and 64 hex digits."""
    return "#" + z85.decode(load_secret_key(path, role)[1]).hex()


def _bind(socket: zmq.Socket, address: str, key: tuple[bytes, bytes] | None) -> str:
    endpoint, _ = split_address(address)
    socket.ipv6 = "[" in endpoint
    if key is None and not is_loopback(address):
        raise ValueError(
            f"{endpoint} can be reached from other machines: that needs --curve-secret-key (radixrt keygen)"
        )
    if key is not None:
        socket.curve_secretkey, socket.curve_publickey = key
        socket.curve_server = True
    if endpoint.startswith("ipc://") and _is_served(endpoint.removeprefix("ipc://")):
        raise OSError(errno.EADDRINUSE, f"cannot listen on {endpoint}: {os.strerror(errno.EADDRINUSE)}")
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise OSError(error.errno, f"cannot listen on {endpoint}: {error.strerror}") from None
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)


def _is_served(path: str) -> bool:
    """Whether somebody listens on an ipc path: ZMQ would take it from them."""
    with sockets.socket(sockets.AF_UNIX) as probe:
        return probe.connect_ex(path.replace("@", "\0", 1) if path.startswith("@") else path) == 0


def bind_http(host: str, port: int, *, shared: bool = False) -> sockets.socket:
    """A socket bound to a port (0: a free one) for HTTP; `shared` with others that are, too. OSError if another has
    it."""
    socket = sockets.socket(sockets.AF_INET6 if ":" in host else sockets.AF_INET, sockets.SOCK_STREAM)
    try:
        socket.setsockopt(sockets.SOL_SOCKET, sockets.SO_REUSEADDR, 1)
        socket.setsockopt(sockets.SOL_SOCKET, sockets.SO_REUSEPORT, int(shared))
        socket.bind((host, port))
    except OSError as error:
        socket.close()
        raise OSError(error.errno, f"cannot listen on {host}:{port}: {error.strerror}") from None
    return socket


def _connect(socket: zmq.Socket, address: str) -> None:
    endpoint, server_key = split_address(address)
    socket.ipv6 = "[" in endpoint
    if server_key is not None:
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
        socket.curve_serverkey = server_key
    try:
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        raise ValueError(f"address {endpoint}: {error.strerror}") from None


def _open(kind: int) -> zmq.Socket:
    socket = zmq.Context.instance().socket(kind)
    socket.linger = 0
    socket.sndhwm = HIGH_WATER
    socket.rcvhwm = HIGH_WATER
    # A peer that vanished without a FIN (cable, power) is noticed within a minute.
    socket.heartbeat_ivl, socket.heartbeat_timeout = 15_000, 45_000
    return socket


def _is_readable(socket: zmq.Socket, milliseconds: int = 0) -> bool:
    """Whether a message is there, or comes within that time (-1: any). To ask costs a third of what ZMQ's exception
    does, and pyzmq's own ways to ask go through an Enum first."""
    return bool(zmq.zmq_poll([(socket, _READABLE)], milliseconds))


def _plain_send(socket: zmq.Socket) -> Callable[..., None]:
    """The `send` of `socket` without what pyzmq does before it for sockets that ZMQ has in draft."""
    return super(zmq.Socket, socket).send


# ---------------------------------------------------------------- asyncio side


class _AsyncSocket(abc.ABC):
    """A ZMQ socket on the event loop, without `zmq.asyncio` (a future a message is ten times the price).

    ZMQ's descriptor is edge triggered: it becomes readable once for any number of messages, and a send may
    swallow that edge. So a wake-up drains until nothing is there, and a send schedules one drain for the turn.
    """

    def __init__(self, socket: zmq.Socket) -> None:
        self._socket = socket
        self._send = _plain_send(socket)
        self._closed = False
        self._loop = asyncio.get_running_loop()
        self._fd = socket.FD
        self._drain_scheduled = False
        self._loop.add_reader(self._fd, self._drain, True)
        self._schedule_drain()

    def _schedule_drain(self) -> None:
        if not self._drain_scheduled:
            self._drain_scheduled = True
            self._loop.call_soon(self._drain)

    def _drain(self, woken: bool = False) -> None:
        """Receive all there is. Who is `woken` by ZMQ finds something nearly always, and does not ask first."""
        self._drain_scheduled = False
        for _ in range(_BATCH):
            if self._closed or not (woken or _is_readable(self._socket)):
                return
            woken = False
            try:
                self._receive_one()
            except zmq.Again:
                return
            except BaseException:
                # The event loop reports it; what is left in the queue would get no edge of its own.
                self._schedule_drain()
                raise
        self._schedule_drain()

    @abc.abstractmethod
    def _receive_one(self) -> None:
        """Take the message that is there and hand it on. zmq.Again if none is."""

    def _receive_last(self) -> tuple[bytes, bool]:
        """The next frame of a message, and whether more came behind it, which are dropped."""
        first = last = self._socket.recv(_NOW, copy=False)
        while last.more:
            last = self._socket.recv(_NOW, copy=False)
        return first.bytes, last is not first

    def close(self) -> None:
        """Stop receiving and drop what was not sent yet. Idempotent."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._fd)
            self._socket.close(0)


class RouterSocket(_AsyncSocket):
    """Listens on `address`; `on_message(identity, payload)` is called on the event loop for each message.

    `key` is a (secret, public) pair of `load_secret_key`. A message that is not one frame after the identity
    arrives as an empty payload, which decodes as no message. ValueError for a bad address or one that other
    machines reach without a key, OSError when it is taken.
    """

    def __init__(
        self,
        address: str,
        on_message: Callable[[bytes, bytes], None],
        *,
        key: tuple[bytes, bytes] | None = None,
        max_bytes: int = -1,
    ) -> None:
        socket = _open(zmq.ROUTER)
        socket.router_mandatory = True
        socket.router_handover = True
        socket.maxmsgsize = max_bytes
        try:
            self.address = _bind(socket, address, key)
        except (ValueError, OSError):
            socket.close(0)
            raise
        self._on_message = on_message
        super().__init__(socket)

    def _receive_one(self) -> None:
        identity = self._socket.recv(_NOW)
        payload, more = self._receive_last()
        self._on_message(identity, b"" if more else payload)

    def send(self, identity: bytes, payload: bytes) -> bool:
        """Queue a message. False when the peer does not read and its queue is full; PeerGone when it has vanished."""
        self._schedule_drain()
        try:
            self._send(identity, _NOW_AND_MORE)
            self._send(payload, _NOW)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno in (zmq.EHOSTUNREACH, errno.ECONNRESET):
                raise PeerGone(identity.hex()) from None
            raise
        return True


class DealerSocket(_AsyncSocket):
    """Connects to `address`; `on_message(payload)` is called on the event loop for each message.

    `on_lost()` is called when an established connection breaks: ZMQ connects again by itself, but what was
    under way is lost (not on inproc). With it, `connected` tells whether the other side is there now; what is sent
    without it waits for one. ValueError for a bad address.
    """

    def __init__(
        self,
        address: str,
        on_message: Callable[[bytes], None],
        *,
        on_lost: Callable[[], None] | None = None,
    ) -> None:
        socket = _open(zmq.DEALER)
        self._on_message = on_message
        self._on_lost = on_lost
        self.connected = address.startswith("inproc:")
        events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        self._monitor = socket.get_monitor_socket(events) if on_lost else None
        try:
            _connect(socket, address)
        except BaseException:
            self._close_monitor(socket)
            socket.close(0)
            raise
        super().__init__(socket)
        if self._monitor:
            self._loop.add_reader(self._monitor.FD, self._drain_monitor)
            self._loop.call_soon(self._drain_monitor)

    def _receive_one(self) -> None:
        self._on_message(self._receive_last()[0])

    def _drain_monitor(self) -> None:
        lost = False
        while self._monitor and _is_readable(self._monitor):
            self.connected = recv_monitor_message(self._monitor)["event"] != zmq.EVENT_DISCONNECTED
            lost = lost or not self.connected
        if lost and self._on_lost:
            self._on_lost()

    def send(self, payload: bytes) -> bool:
        """Queue a message; False when the queue is full because the router does not read."""
        self._schedule_drain()
        try:
            self._send(payload, _NOW)
        except zmq.Again:
            return False
        return True

    def _close_monitor(self, socket: zmq.Socket) -> None:
        if self._monitor:
            socket.disable_monitor()
            self._monitor.close(0)
            self._monitor = None

    def close(self) -> None:
        """Disconnect, dropping what was not sent yet. Idempotent."""
        if not self._closed:
            if self._monitor:
                self._loop.remove_reader(self._monitor.FD)
            self._close_monitor(self._socket)
        self.connected = False
        super().close()


# ---------------------------------------------------------------- the worker's side


class Link:
    """A blocking connection for one thread (ZMQ sockets are not thread safe: a second thread opens its own).

    `identity` names this end to the router; a newer link of the same identity replaces it.
    """

    def __init__(self, address: str, identity: bytes | None = None, *, send_timeout: float = 10.0) -> None:
        self._socket = _open(zmq.DEALER)
        self._socket.sndtimeo = round(send_timeout * 1000)
        if identity is not None:
            self._socket.identity = identity
        try:
            _connect(self._socket, address)
        except BaseException:
            self._socket.close(0)
            raise
        self._send = _plain_send(self._socket)

    def send(self, payload: bytes) -> None:
        """Queue a message. TimeoutError when the router has read nothing for so long that the queue is full."""
        try:
            self._send(payload)
        except zmq.Again:
            raise TimeoutError("the router does not read") from None

    def recv(self, timeout: float | None = None) -> bytes | None:
        """The next message; None when none came within `timeout` seconds (None: wait for ever)."""
        if timeout is None:
            milliseconds = -1
        else:
            milliseconds = max(1, round(timeout * 1000)) if timeout else 0
        return self._socket.recv(_NOW) if _is_readable(self._socket, milliseconds) else None

    def drain(self) -> list[bytes]:
        """Every message that has arrived, without waiting."""
        messages = []
        while (message := self.recv(0)) is not None:
            messages.append(message)
        return messages

    def close(self, linger: float = 0.0) -> None:
        """Disconnect; `linger` seconds are given to messages not yet sent. Idempotent."""
        if not self._socket.closed:
            self._socket.close(round(linger * 1000))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()


class Watch:
    """A connection to `address` on which nothing is sent: whether somebody is there. For one thread. ValueError for a
    bad address."""

    def __init__(self, address: str) -> None:
        self._socket = _open(zmq.DEALER)
        self.connected = False
        self.refused = False
        """Somebody is there who does not take the key, or is no router."""
        events = zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        self._monitor = self._socket.get_monitor_socket(events)
        try:
            _connect(self._socket, address)
        except BaseException:
            self.close()
            raise

    def look(self) -> bool:
        """Whether somebody is there now."""
        while _is_readable(self._monitor):
            event = recv_monitor_message(self._monitor)["event"]
            if event == zmq.EVENT_DISCONNECTED:
                self.refused = not self.connected
            self.connected = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
        return self.connected

    def close(self) -> None:
        """Idempotent."""
        if not self._socket.closed:
            self._socket.disable_monitor()
            self._monitor.close(0)
            self._socket.close(0)
