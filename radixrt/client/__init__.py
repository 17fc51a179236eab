"""The clients, asynchronous and synchronous, and what both give and take."""

from radixrt.client.async_client import AsyncClient
from radixrt.client.client import Client
from radixrt.client.prompts import Completion, Parsed, PromptLike, as_prompt, token_bytes, token_list
from radixrt.client.transports import ServerError

__all__ = [
    "AsyncClient",
    "Client",
    "Completion",
    "Parsed",
    "PromptLike",
    "ServerError",
    "as_prompt",
    "token_bytes",
    "token_list",
]
