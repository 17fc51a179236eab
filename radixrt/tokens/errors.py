"""Errors that name a field of the request."""

from __future__ import annotations

from typing import NamedTuple


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


class Room(NamedTuple):
    """The most tokens of prompt and output together, at least `least` of which are for the output."""

    limit: int
    least: int = 1

    def check(self, tokens: int, *, whole: bool = True) -> None:
        """Raise FieldError if a prompt of so many tokens, or more if that is not the `whole` prompt, does not fit."""
        if tokens + self.least > self.limit:
            more = "" if whole else "; it was not counted to its end"
            raise FieldError("prompt", too_long(tokens, self.limit, self.least) + more)
