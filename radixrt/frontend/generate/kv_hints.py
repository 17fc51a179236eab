"""The field `kv_hints` of a request, and the fields of an action. Pure; every error names the field.

Names are those that others propose or have: the verbs, `session` and `destination` of vLLM's RFC 51428, the envelope
`kv_hints` of its RFC 53421 and of SGLang's 36224, `priority`, `token_start` and `token_end` of TensorRT-LLM, `ttl` of
Anthropic.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from radixrt.frontend.http.codec import parse
from radixrt.frontend.http.errors import refuse
from radixrt.messages import CacheAction, CacheVerb, Name
from radixrt.requests.validate import MAX_ACTIONS, Refused, check_action, check_actions

VERBS: tuple[CacheVerb, ...] = ("pin", "retain", "demote", "prefetch", "share")
UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}
Tokens = Annotated[int, msgspec.Meta(ge=0, le=(1 << 31) - 1)]


class Fields(msgspec.Struct, kw_only=True):
    """What an action may say beside its verb. `ttl`: seconds, or as in "5m"."""

    token_start: Tokens | None = None
    token_end: Tokens | None = None
    priority: Annotated[int, msgspec.Meta(ge=0, le=100)] | None = None
    ttl: float | str | None = None
    destination: Name | None = None

    def action(self, verb: CacheVerb, field: str = "") -> CacheAction:
        """The action of a verb; errors are of fields below `field`. Raises Refused (400)."""
        of = CacheAction(verb)
        start, priority = self.token_start or 0, of.priority if self.priority is None else self.priority
        seconds = None if self.ttl is None else _seconds(self.ttl, f"{field}ttl")
        return CacheAction(verb, start, self.token_end, priority, seconds, self.destination or "")


class Action(msgspec.Struct, kw_only=True):
    """An action of `kv_hints`. Those of other types are of no meaning here, and ignored."""

    action_type: str
    payload: msgspec.Raw = msgspec.Raw(b"{}")
    action_id: str | None = None
    action_version: str | None = None


class KvHints(msgspec.Struct, kw_only=True):
    """The field `kv_hints` of a request: what is to become of its tokens when it has ended."""

    actions: list[Action]
    protocol_version: str | None = None
    message_id: str | None = None

    def to_actions(self) -> list[CacheAction]:
        """The actions. Raises Refused (400)."""
        found = []
        for index, one in enumerate(self.actions):
            verb = one.action_type.removeprefix("kv.")
            if verb in VERBS:
                field = f"kv_hints.actions[{index}].payload"
                action = parse(_fields, one.payload, field).action(verb, f"{field}.")
                check_action(action, field)
                found.append(action)
        if len(found) > MAX_ACTIONS:
            refuse("kv_hints.actions", f"at most {MAX_ACTIONS}")
        check_actions(found, "kv_hints.actions")
        return found


_fields = msgspec.json.Decoder(Fields)


def _seconds(ttl: float | str, field: str) -> float:
    if isinstance(ttl, str):
        number, unit = ttl[:-1], UNITS.get(ttl[-1:])
        if unit is None or not number.isdigit() or len(number) > 9:
            raise Refused(field, f"{field} must be a number of seconds, or as in '90s', '5m' or '1h', not {ttl!r}")
        ttl = int(number) * unit
    if not ttl > 0:
        raise Refused(field, f"{field} must be above 0")
    return ttl
