"""Errors that name a field of the request."""

from __future__ import annotations


class FieldError(ValueError):
    """Invalid input. `field` is the request's field (`messages[2].content`); the text says what is wrong with it."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


MAX_CONTEXT = "this model's maximum context length is"
"""A part of `too_long`'s message, and of no other error: clients recognize OpenAI's error by it."""


def too_long(tokens: int, limit: int, least: int) -> str:
    """The error message for a prompt of `tokens` tokens, where prompt and output may have `limit` together and the
    output needs `least`. It begins as Anthropic's message does, by which clients recognize that error."""
    most = limit - least
    return f"the prompt is too long: {tokens} tokens > {most} maximum; {MAX_CONTEXT} {limit} tokens, output included"
