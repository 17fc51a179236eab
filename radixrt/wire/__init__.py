"""The socket layer: sends and receives messages, and makes no decisions about them.

    DealerSocket (client, front end)  --tcp/ipc/inproc-->  RouterSocket (router, clients' side)
    Link         (worker's thread)    --tcp/ipc/inproc-->  RouterSocket (router, workers' side)

A ROUTER/DEALER message is `[identity,] payload`; a payload is the msgpack of one tagged union of `radixrt.messages`.
Each process has one ZMQ context, so that `inproc://` connects its threads.
"""

from __future__ import annotations

import msgspec

from radixrt.wire.event_loop import DealerSocket, PeerGone, RouterSocket
from radixrt.wire.link import Link

__all__ = ["MAX_CLIENT_BYTES", "DealerSocket", "Decoder", "Link", "Malformed", "PeerGone", "RouterSocket", "encode"]

Decoder = msgspec.msgpack.Decoder
Malformed = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Raised by `Decoder.decode` for bytes that are not a message of its union."""
encode = msgspec.msgpack.Encoder().encode

MAX_CLIENT_BYTES = 64 << 20
"""Size of the largest message that a client may send. ZMQ drops the connection if it sends a larger one."""
