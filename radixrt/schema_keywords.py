"""Keywords of JSON schemas, by what their values are."""

from __future__ import annotations

DEFINED = frozenset({"$defs", "definitions"})
"""Schemas by names, for references."""
NAMED = DEFINED | {"properties", "patternProperties", "dependentSchemas"}
"""Schemas by names."""
DATA = frozenset({"const", "enum", "default", "examples"})
"""No schemas."""
