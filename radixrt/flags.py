"""The command line's flags: one for each setting, under all the names that users of vLLM and SGLang know it by."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import typing
from collections.abc import Sequence, Set
from typing import Any, NoReturn

from radixrt.config import flag

ALIASES = {
    "workers": ["--data-parallel-size", "--dp-size", "--dp", "-dp"],
    "tensor_parallel_size": ["--tp-size", "--tp", "-tp"],
    "tokenizer": ["--tokenizer-path"],
    "max_model_len": ["--context-length"],
    "max_num_seqs": ["--max-running-requests"],
    "max_num_batched_tokens": ["--chunked-prefill-size"],
    "gpu_memory_utilization": ["--mem-fraction-static"],
    "page_size": ["--block-size"],
    "deterministic": ["--enable-deterministic-inference"],
    "enforce_eager": ["--disable-cuda-graph"],
}
NOTES = {
    "--enable-prefix-caching": "prefixes are always cached",
    "--enable-chunked-prefill": "long prompts are always computed in chunks (--max-num-batched-tokens)",
    "--enable-auto-tool-choice": "models may always call the tools of a request (--tool-call-parser)",
    "--trust-remote-code": "code that comes with a checkpoint is never run; it is served as its model_type",
    "--no-enable-log-requests": "requests are never logged",
    "--disable-log-requests": "requests are never logged",
}
"""Flags that are taken and change nothing -> what is so instead."""
UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
"""As in vLLM."""


class Parser(argparse.ArgumentParser):
    """Takes flags that are written in full, and says in one line what is wrong."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)
        self.set_defaults(parser=self)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


class OneModel(argparse.Action):
    """A model may be named by a flag or without one, but there is only one."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, _option: str | None = None) -> None:
        earlier = getattr(namespace, self.dest, values)
        if earlier != values:
            parser.error(f"two models are named, {earlier} and {values}")
        setattr(namespace, self.dest, values)


def parse(parser: Parser, arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """As `parser.parse_args`. The error for a flag that there is not names the one that is most like it."""
    args, rest = parser.parse_known_args(arguments)
    if rest:
        args.parser.error(_unknown(rest, args.parser))
    return args


def _unknown(rest: Sequence[str], parser: argparse.ArgumentParser) -> str:
    name = next((text.partition("=")[0] for text in rest if text[:1] == "-" and text != "--"), "")
    if not name:
        return f"{rest[0]!r} is one argument too many"
    known = [
        text for action in parser._actions if action.help != argparse.SUPPRESS for text in action.option_strings
    ]  # fmt: skip
    near = difflib.get_close_matches(name, known, 1)
    return f"there is no flag {name}" + (f"; is {near[0]} meant?" if near else f" ({parser.prog} --help)")


def number(text: str) -> int:
    """A whole number, also with a unit: 32k is 32,000, 32K is 32,768. Raises ValueError."""
    if text[-1:] not in UNITS:
        return int(text)
    found = round(float(text[:-1]) * UNITS[text[-1]], 6)
    if not found.is_integer():
        raise ValueError(text)
    return int(found)


def add_model(parser: argparse.ArgumentParser, help: str) -> None:
    """Add MODEL, which may stand by itself or after a flag."""
    options: dict[str, Any] = {"action": OneModel, "default": argparse.SUPPRESS, "metavar": "MODEL", "help": help}
    parser.add_argument("model", nargs="?", **options)
    parser.add_argument("--model", "--model-path", dest="model", **options | {"help": "the same"})


def add_notes(parser: argparse.ArgumentParser) -> None:
    """Add the flags that change nothing: `args.notes` says of those that were given what is so instead."""
    group = parser.add_argument_group("flags of other servers that change nothing here")
    for name, note in NOTES.items():
        options: dict[str, Any] = {"dest": "notes", "default": argparse.SUPPRESS, "help": note}
        group.add_argument(name, action="append_const", const=f"{name}: {note}", **options)


def add_fields(parser: argparse.ArgumentParser, config: type, *, leave_out: Set[str] = frozenset()) -> None:
    """Add a flag for each field of `config` that has a help text, unless the parser has that flag already: for a field
    `max_num_seqs` the flag `--max-num-seqs`."""
    types = typing.get_type_hints(config)
    known = {action.dest for action in parser._actions}
    for field in dataclasses.fields(config):
        if field.name in known | leave_out or "help" not in field.metadata:
            continue
        kind = types[field.name]
        flags = [flag(field.name), *ALIASES.get(field.name, ())]
        options: dict[str, Any] = {"dest": field.name, "default": argparse.SUPPRESS, "help": field.metadata["help"]}
        if kind is bool and field.default:  # with a flag --no-... as well
            options["help"] += " (default: on)"
            parser.add_argument(*flags, action=argparse.BooleanOptionalAction, **options)
        elif kind is bool:
            parser.add_argument(*flags, action="store_true", **options)
        elif typing.get_origin(kind) is tuple:
            options |= {"action": "extend", "nargs": "+"} if field.metadata["several"] else {"action": "append"}
            parser.add_argument(*flags, metavar=field.name.upper(), **options)
        else:
            options["help"] += "" if field.default in ("", 0) else f" (default: {field.default})"
            parse_value = number if kind is int else kind
            parser.add_argument(*flags, type=parse_value, metavar=kind.__name__.upper(), **options)


def from_args(config: type, args: argparse.Namespace) -> Any:
    """Make a `config` from the flags that were given; other fields keep their defaults. Raises ValueError for what is
    no JSON list, but begins as one."""
    given = vars(args)
    changes = {
        field.name: _value(field, given[field.name]) for field in dataclasses.fields(config) if field.name in given
    }
    return config(**changes)


def _value(field: dataclasses.Field[Any], given: Any) -> Any:
    if not isinstance(given, list):
        return given
    return tuple(item for text in given for item in (_items(field.name, text) if field.metadata["json"] else [text]))


def _items(name: str, text: str) -> list[str]:
    """What a value of a flag names: one item, or those of a JSON list. Items that are no strings stay JSON."""
    if text.lstrip()[:1] != "[":
        return [text]
    try:
        items = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{flag(name)} {text!r}: it is no JSON list ({error})") from None
    return [item if isinstance(item, str) else json.dumps(item) for item in items]
