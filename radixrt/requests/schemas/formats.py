"""Formats of strings: as patterns, by xgrammar's own rules, or not at all."""

from __future__ import annotations

DATE = (
    r"(?:\d{3}[1-9]|\d{2}[1-9]\d|\d[1-9]\d{2}|[1-9]\d{3})"
    r"-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|02-(?:0[1-9]|1\d|2[0-8]))"
    r"|(?:\d{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)-02-29"
)
TIME = r"(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d+)?(?:Z|[+-](?:[01]\d|2[0-3]):[0-5]\d)"
BYTE = r"(?:\d|[1-9]\d|1\d\d|2[0-4]\d|25[0-5])"
PATTERNS = {
    "date": f"^(?:{DATE})$",
    "time": f"^{TIME}$",
    "date-time": f"^(?:{DATE})T{TIME}$",
    "uuid": "^[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}$",
    "ipv4": rf"^{BYTE}(?:\.{BYTE}){{3}}$",
}
"""Formats that are written as patterns: no day that its month has not, whatever else the schema asks for."""
ENFORCED = {
    "duration": 3, "email": 3, "hostname": 1, "ipv6": 2, "json-pointer": 0, "relative-json-pointer": 1, "uri": 2,
    "uri-reference": 0, "uri-template": 0,
}  # fmt: skip
"""Formats that xgrammar enforces, with the fewest characters of one."""
UNSERVED = frozenset({"idn-email", "idn-hostname", "iri", "iri-reference", "regex"})
"""Formats of JSON Schema that nothing here enforces. All others are no formats of JSON Schema: only annotations."""
