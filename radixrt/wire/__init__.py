"""The socket layer: messages in, messages out, no policy.

    DealerSocket (client, front end)  --tcp/ipc/inproc-->  RouterSocket (router, clients' side)
    Link         (worker's thread)    --tcp/ipc/inproc-->  RouterSocket (router, workers' side)

A ROUTER/DEALER message is `[identity,] payload`; a payload is the msgpack of one tagged union of
`radixrt.messages`. Every process has one ZMQ context, so that `inproc://` joins threads of a process.
"""

from __future__ import annotations

import msgspec

from radixrt.wire.event_loop import DealerSocket, PeerGone, RouterSocket
from radixrt.wire.link import Link

__all__ = ["MAX_CLIENT_BYTES", "DealerSocket", "Decoder", "Link", "Malformed", "PeerGone", "RouterSocket", "encode"]

Decoder = msgspec.msgpack.Decoder
Malformed = msgspec.MsgspecError
"""What `Decoder.decode` raises for bytes that are no message of its union."""
encode = msgspec.msgpack.Encoder().encode

MAX_CLIENT_BYTES = 64 << 20
"""Largest message taken from a client; ZMQ drops the connection of one that sends more."""
