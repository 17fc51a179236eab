"""What the core wants sent. The loop sends it."""

from __future__ import annotations

from typing import NamedTuple

from radixrt.messages import ClientReply, ToWorker
from radixrt.router.request import Client


class Reply(NamedTuple):
    """`message` for a client."""

    client: Client
    message: ClientReply


class Order(NamedTuple):
    """`message` for the worker called `name`."""

    name: str
    message: ToWorker


Effect = Reply | Order
