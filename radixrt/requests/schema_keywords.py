"""Keywords of JSON Schema, classified by their values."""

from __future__ import annotations

DEFINED = frozenset({"$defs", "definitions"})
"""The value is an object of named schemas, which `$ref` can refer to."""
NAMED = DEFINED | {"properties", "patternProperties", "dependentSchemas"}
"""The value is an object of named schemas."""
DATA = frozenset({"const", "enum", "default", "examples"})
"""The value is plain data and contains no schemas."""
