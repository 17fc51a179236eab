"""The Jinja environment of chat templates: that of transformers, and one more filter."""

from __future__ import annotations

import json
from collections.abc import Callable, Sized
from datetime import datetime
from typing import Any, ClassVar, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_REPEATED = 1 << 24
"""The most elements of a text or list that a template may repeat, and bits of a power."""


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Refuse products and powers that would take gigabytes."""
        if operator == "**":
            size = right * left.bit_length() if isinstance(left, int) and isinstance(right, int) else 0
        else:
            pairs = ((left, right), (right, left))
            size = next((len(a) * b for a, b in pairs if isinstance(a, Sized) and isinstance(b, int)), 0)
        if size > MAX_REPEATED:
            raise jinja2.TemplateRuntimeError("the template computes a value that is too large")
        return super().call_binop(context, operator, left, right)

    def handle_exception(self, source: str | None = None) -> NoReturn:
        """Raise the exception unchanged. Jinja would rewrite its traceback, which makes a reference cycle that keeps
        the chat alive until the garbage collector runs."""
        raise  # noqa: PLE0704


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's text for training; here its body is plain text."""

    tags: ClassVar[set[str]] = {"generation"}

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


def templates_environment() -> jinja2.Environment:
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.filters["from_json"] = json.loads  # used by llama.cpp's and vLLM's templates
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
