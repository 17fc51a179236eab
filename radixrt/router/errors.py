"""Errors that name the request's field they are about."""

from __future__ import annotations


class FieldError(ValueError):
    """Bad input. `field` is the request's field (`messages[2].content`); the text says what is wrong with it."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


MAX_CONTEXT = "this model's maximum context length is"
"""Words of `too_long`, and of no other error. Clients that know OpenAI's errors by their text look for them."""


def too_long(tokens: int, limit: int, least: int) -> str:
    """What to say of a prompt of `tokens`, where prompt and output may have `limit` together and the output needs
    `least`. It begins as Anthropic's message does, which clients look for too."""
    most = limit - least
    return f"the prompt is too long: {tokens} tokens > {most} maximum; {MAX_CONTEXT} {limit} tokens, output included"
