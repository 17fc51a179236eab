"""The clients, asynchronous and synchronous, and what both give and take."""

from radixrt.client.async_client import AsyncClient
from radixrt.client.client import Client
from radixrt.client.hints import CacheOutcome
from radixrt.client.prompts import Completion, Parsed, PromptLike, as_prompt, token_bytes, token_list
from radixrt.client.transports import ServerError

__all__ = [
    "AsyncClient",
    "CacheOutcome",
    "Client",
    "Completion",
    "Parsed",
    "PromptLike",
    "ServerError",
    "as_prompt",
    "token_bytes",
    "token_list",
]
