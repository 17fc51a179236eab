"""The Jinja environment of chat templates: that of transformers, and one more filter."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sized
from datetime import datetime
from typing import Any, ClassVar, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import do_format
from jinja2.sandbox import ImmutableSandboxedEnvironment

from radixrt.tokens.special_text import ESCAPE, Escaper

MAX_REPEATED = 1 << 24
"""The most elements of a text or list that a template may repeat, and bits of a power."""


_LITERAL = re.compile(r"%%|\{\{|\}\}")
_WIDE_PERCENT = re.compile(r"%[^%a-zA-Z]*(\d{7,}|\*)")
_WIDE_BRACES = re.compile(r"\{[^{}]*:[^{}]*(\d{7,}|\{)")
"""Formats with a width of millions, or one that is an argument."""
_PADDING = ("center", "ljust", "rjust", "zfill", "expandtabs")
_FORMATS = ("format", "format_map")
TOO_LARGE = "the template computes a value that is too large"


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**", "%"})

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Lists may grow and shrink by one: Kimi K2's template has a queue."""
        return (isinstance(obj, list) and attr in ("append", "pop")) or super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Refuse products and powers that would take gigabytes."""
        if operator == "%":
            size = _width(_WIDE_PERCENT, left)
        elif operator == "**":
            size = right * left.bit_length() if isinstance(left, int) and isinstance(right, int) else 0
        else:
            pairs = ((left, right), (right, left))
            size = next((len(a) * b for a, b in pairs if isinstance(a, Sized) and isinstance(b, int)), 0)
        if size > MAX_REPEATED:
            raise jinja2.TemplateRuntimeError(TOO_LARGE)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Refuse to pad a text to gigabytes."""
        if isinstance(getattr(obj, "__self__", None), str) and obj.__name__ in _PADDING:
            _check_numbers((*args, *kwargs.values()))
        return super().call(context, obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Any:
        """As `call`, for `str.format`."""
        text = getattr(value, "__self__", None)
        if isinstance(text, str) and value.__name__ in _FORMATS and _width(_WIDE_BRACES, text):
            raise jinja2.TemplateRuntimeError(TOO_LARGE)
        return super().wrap_str_format(value)

    def handle_exception(self, source: str | None = None) -> NoReturn:
        """Raise the exception unchanged. Jinja would rewrite its traceback, which makes a reference cycle that keeps
        the chat alive until the garbage collector runs."""
        raise  # noqa: PLE0704


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's text for training; here its body is plain text."""

    tags: ClassVar[set[str]] = {"generation"}  # type: ignore[misc]  # jinja2 declares it for instances

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


def templates_environment(escaper: Escaper | None = None) -> jinja2.Environment:
    """With an `escaper`, what templates parse stays escaped."""
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    for name in ("center", "indent", "format"):
        environment.filters[name] = _bounded(environment.filters[name])
    environment.filters["tojson"] = _bounded(_to_json)
    # used by llama.cpp's and vLLM's templates
    environment.filters["from_json"] = (lambda text: escaper.parsed(json.loads(text))) if escaper else json.loads
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _width(wide: re.Pattern[str], text: Any) -> int:
    """More than MAX_REPEATED if a format is `wide`, else 0."""
    return 2 * MAX_REPEATED if isinstance(text, str) and wide.search(_LITERAL.sub("", text)) else 0


def _check_numbers(values: Iterable[Any]) -> None:
    if any(isinstance(value, int) and value > MAX_REPEATED for value in values):
        raise jinja2.TemplateRuntimeError(TOO_LARGE)


def _bounded(work: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that pads its text only to what is not too large."""

    @functools.wraps(work)
    def bounded(value: Any, *args: Any, **kwargs: Any) -> Any:
        _check_numbers((*args, *kwargs.values()))
        if work is do_format and _width(_WIDE_PERCENT, value):
            raise jinja2.TemplateRuntimeError(TOO_LARGE)
        return work(value, *args, **kwargs)

    return bounded


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    text = json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys, default=_listed
    )
    return text.replace("\\ufdd0", ESCAPE) if ensure_ascii else text


def _listed(value: Any) -> list[Any]:
    """What `map` and `select` return."""
    if isinstance(value, Iterator):
        return list(value)
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
