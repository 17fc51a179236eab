"""Errors in the format of Ollama's API."""

from __future__ import annotations

import msgspec

from radixrt.frontend.http.errors import ApiError

OLLAMA_PATH = "/api/"
"""The prefix of the paths of Ollama's API."""
_encode = msgspec.json.Encoder().encode


class OllamaError(ApiError):
    """An ApiError in Ollama's format: its message alone, which names the field."""

    @classmethod
    def wrap(cls, error: ApiError) -> OllamaError:
        """The same error in Ollama's format."""
        return cls(error.status, error.message, error.param, error.code, error.retry_after)

    def body(self) -> bytes:
        return _encode({"error": self.message})
