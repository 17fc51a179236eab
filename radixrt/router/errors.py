"""Errors that name the request's field they are about."""

from __future__ import annotations


class FieldError(ValueError):
    """Bad input. `field` is the request's field (`messages[2].content`); the text says what is wrong with it."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field
