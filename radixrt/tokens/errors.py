"""Errors that name a field of the request."""

from __future__ import annotations

from typing import NamedTuple, NoReturn

from msgspec import UNSET, UnsetType

from radixrt.messages import ErrorReason


class FieldError(ValueError):
    """Invalid input. `field` is the request's field (`messages[2].content`); the text says what is wrong with it."""

    def __init__(self, field: str, message: str, reason: ErrorReason | UnsetType = UNSET) -> None:
        super().__init__(message)
        self.field = field
        self.reason = reason


def refuse(field: str, message: str) -> NoReturn:
    """Raise FieldError for an invalid `field` of the request."""
    raise FieldError(field, f"{field}: {message}")


class Unbounded(FieldError):
    """A chat template has written too much, or taken too long."""

    def __init__(self, why: str) -> None:
        super().__init__("messages", f"the chat template {why} for these messages")


class Room(NamedTuple):
    """The most tokens of prompt and output together, at least `least` of which are for the output."""

    limit: int
    least: int = 1

    def check(self, tokens: int, *, whole: bool = True) -> None:
        """Raise FieldError if a prompt of so many tokens, or more if that is not the `whole` prompt, does not fit. Its
        text begins as Anthropic's does, and goes on as OpenAI's: clients recognize them."""
        if tokens + self.least > self.limit:
            text = f"the prompt is too long: {tokens} tokens > {self.limit - self.least} maximum; this model's maximum "
            text += f"context length is {self.limit} tokens, output included"
            more = "" if whole else "; it was not counted to its end"
            raise FieldError("prompt", text + more, ErrorReason.CONTEXT_LENGTH)
