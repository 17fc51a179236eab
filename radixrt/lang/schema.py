"""Schemas of generated JSON: converts a program's schema to text, and generated text to values."""

from __future__ import annotations

import sys
from typing import Any

import msgspec

from radixrt.messages import Grammar


def grammar_of(name: str, regex: str | None, schema: Any) -> Grammar | None:
    """The grammar of `gen(name, regex=, schema=)`; None without either. Raises ValueError for both, or for an invalid
    schema, and TypeError for a type without a schema."""
    if regex is not None and schema is not None:
        raise ValueError(f"gen {name!r}: regex and schema cannot both be followed")
    if regex is not None:
        return Grammar("regex", regex)
    return None if schema is None else Grammar("json_schema", _schema_text(name, schema))


def _schema_text(name: str, schema: Any) -> str:
    if isinstance(schema, str):
        try:
            msgspec.json.decode(schema)
        except msgspec.DecodeError as error:
            raise ValueError(f"gen {name!r}: the schema is not JSON: {error}") from error
        return schema
    if not _is_type(schema):
        return msgspec.json.encode(schema).decode()
    try:
        adapter = _adapter(schema)
        json_schema = msgspec.json.schema(schema) if adapter is None else adapter.json_schema()
    except TypeError as error:
        raise TypeError(f"gen {name!r}: no schema is known of {schema!r}: {error}") from error
    return msgspec.json.encode(json_schema).decode()


def parse(text: str, schema: Any) -> Any:
    """Convert generated JSON to an object of the type that was the schema, or else to plain Python values. Raises
    ValueError for text that was cut off, or that does not match the type."""
    if not _is_type(schema):
        return msgspec.json.decode(text)
    adapter = _adapter(schema)
    return msgspec.json.decode(text, type=schema) if adapter is None else adapter.validate_json(text)


def _adapter(schema: Any) -> Any:
    """Pydantic's TypeAdapter: `schema` itself, or one for a type that is, or contains, a pydantic model. None for types
    that msgspec knows."""
    if hasattr(schema, "json_schema") and hasattr(schema, "validate_json"):
        return schema
    if not hasattr(schema, "model_json_schema"):
        try:
            msgspec.json.schema(schema)
            return None
        except TypeError:
            if schema is object or "pydantic" not in sys.modules:
                raise
    import pydantic

    try:
        return pydantic.TypeAdapter(schema)
    except pydantic.errors.PydanticUserError as error:
        raise TypeError(str(error).partition("\n")[0]) from error


def _is_type(schema: Any) -> bool:
    """Whether a schema is given as a type (a msgspec Struct, a pydantic model, a dataclass, `list[int]`, a TypeAdapter)
    rather than as a JSON schema."""
    return schema is not None and not isinstance(schema, str | dict | bool)
