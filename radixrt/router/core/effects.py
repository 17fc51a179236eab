"""The messages that the core returns for the loop to send."""

from __future__ import annotations

from typing import NamedTuple

from radixrt.messages import ClientReply, ToWorker

Client = bytes
"""The ZMQ identity of a client."""


class Reply(NamedTuple):
    """A `message` to a client."""

    client: Client
    message: ClientReply


class Order(NamedTuple):
    """A `message` to the worker of that `name`."""

    name: str
    message: ToWorker


Effect = Reply | Order
