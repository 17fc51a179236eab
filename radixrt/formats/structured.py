"""Structured output: converts the fields of OpenAI, vLLM and SGLang to one Grammar."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from radixrt.formats.parsing import json_schema
from radixrt.messages import Grammar
from radixrt.requests.grammar import MAX_TEXT
from radixrt.requests.schemas.widen import widened
from radixrt.tokens.errors import refuse

OBJECT = Grammar("json_schema", '{"type":"object"}')


@dataclass(frozen=True, slots=True)
class Constraint:
    """A grammar, and the field that it comes from."""

    grammar: Grammar
    field: str
    unenforced: tuple[str, ...] = ()
    """Keywords of a schema that the grammar leaves out."""

    def as_format(self) -> dict[str, Any]:
        """The grammar as a part of a structural tag. Raises FieldError if it cannot be one."""
        text = self.grammar.text
        match self.grammar.kind:
            case "json":
                return json_schema(True)
            case "json_schema":
                return json_schema(_loaded(text, self.field))
            case "regex":
                return {"type": "regex", "pattern": text}
            case "ebnf":
                return {"type": "grammar", "grammar": text}
        tag = _loaded(text, self.field)
        if not isinstance(tag, dict) or not isinstance(tag.get("format"), dict):
            refuse(self.field, "a structural tag without a format is not served beside tools or reasoning")
        return tag["format"]


def constraint(fields: Mapping[str, Any]) -> Constraint | None:
    """The constraint in the `fields` of a request, if any. Raises FieldError if there are two, or one is
    invalid."""
    found: list[Constraint] = []
    for field, read in _FIELDS.items():
        if fields.get(field) not in (None, False, {}) and (grammar := read(fields[field], field)) is not None:
            found.append(grammar)
    for other in found[1:]:
        if other.grammar != found[0].grammar:
            refuse(other.field, f"only one of {found[0].field} and {other.field} can be followed")
    return found[0] if found else None


# ---------------------------------------------------------------- fields


def _response_format(value: dict[str, Any], field: str) -> Constraint | None:
    match value.get("type", "text"):
        case "text":
            return None
        case "json_object":
            # A `schema` here is an extension of llama.cpp and others.
            return _schema(value["schema"], f"{field}.schema") if value.get("schema") else Constraint(OBJECT, field)
        case "json_schema":
            return named_schema(value.get("json_schema"), f"{field}.json_schema")
        case "structural_tag":
            return Constraint(Grammar("structural_tag", _dumped(value, field)), field)
        case kind:
            refuse(f"{field}.type", f"must be text, json_object, json_schema or structural_tag, not {kind!r}")


def named_schema(value: Any, field: str) -> Constraint:
    """The constraint of an object with a name and a schema, which is widened if it need not be followed strictly.
    Raises FieldError that names an invalid field."""
    if not isinstance(value, dict):
        refuse(field, "must be an object with a name and a schema")
    if not isinstance(value.get("name"), str):
        refuse(f"{field}.name", "must be a string")
    if not isinstance(value.get("strict"), bool | None):
        refuse(f"{field}.strict", "must be true or false")
    if not isinstance(value.get("schema"), dict):
        refuse(f"{field}.schema", "must be a JSON schema")
    field += ".schema"
    if value.get("strict") is not False:
        return _schema(value["schema"], field)
    schema, left_out = widened(value["schema"])
    return replace(_schema(schema, field), unenforced=tuple(field + at for at in left_out))


def _structured_outputs(value: Any, field: str) -> Constraint | None:
    if not isinstance(value, dict):
        refuse(field, "must be an object")
    for name in _UNSERVED:
        if value.get(name):
            refuse(f"{field}.{name}", "is not served")
    found = [
        one
        for name, read in _STRUCTURED.items()
        if value.get(name) not in (None, False) and (one := read(value[name], f"{field}.{name}"))
    ]
    if len(found) > 1:
        refuse(found[1].field, f"only one of {found[0].field} and {found[1].field} can be followed")
    return found[0] if found else None


def _schema(value: Any, field: str) -> Constraint:
    if isinstance(value, str):
        value = _loaded(value, field)
    if not isinstance(value, dict):
        refuse(field, "must be a JSON schema")
    return Constraint(Grammar("json_schema", _dumped(value, field)), field)


def _regex(value: Any, field: str) -> Constraint:
    return Constraint(Grammar("regex", _text(value, field)), field)


def _ebnf(value: Any, field: str) -> Constraint:
    return Constraint(Grammar("ebnf", _text(value, field)), field)


def _choice(value: Any, field: str) -> Constraint:
    if not isinstance(value, list) or not value or not all(isinstance(text, str) and text for text in value):
        refuse(field, "must be a list of texts, none of them empty")
    # Strings in EBNF are escaped as in JSON.
    choices = " | ".join(json.dumps(text, ensure_ascii=False) for text in value)
    return Constraint(Grammar("ebnf", f"root ::= {choices}"), field)


def _structural_tag(value: Any, field: str) -> Constraint:
    return Constraint(Grammar("structural_tag", value if isinstance(value, str) else _dumped(value, field)), field)


def _json_object(value: Any, field: str) -> Constraint:
    return Constraint(OBJECT, field)


_Read = Callable[[Any, str], Constraint | None]

_FIELDS: dict[str, _Read] = {
    "response_format": _response_format,
    "structured_outputs": _structured_outputs,
    "guided_json": _schema,
    "guided_regex": _regex,
    "guided_grammar": _ebnf,
    "guided_choice": _choice,
    "json_schema": _schema,
    "regex": _regex,
    "ebnf": _ebnf,
}
FIELDS = tuple(_FIELDS)
_STRUCTURED: dict[str, _Read] = {
    "json": _schema,
    "regex": _regex,
    "choice": _choice,
    "grammar": _ebnf,
    "json_object": _json_object,
    "structural_tag": _structural_tag,
}
_UNSERVED = ("disable_additional_properties", "disable_any_whitespace", "whitespace_pattern")
"""Fields of vLLM's structured_outputs that would change an answer."""


def _text(value: Any, field: str) -> str:
    if not isinstance(value, str) or not value:
        refuse(field, "must be a text that is not empty")
    return value


def _loaded(text: str, field: str) -> Any:
    if len(text) > MAX_TEXT:
        refuse(field, f"has {len(text)} characters, at most {MAX_TEXT} are served")
    try:
        return json.loads(text)
    except ValueError as problem:
        refuse(field, f"is not JSON: {problem}")
    except RecursionError:
        refuse(field, "is nested too deeply")


def _dumped(value: Any, field: str) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    except RecursionError:
        refuse(field, "is nested too deeply")
