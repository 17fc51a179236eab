"""Items that a request refers to by their ids. An id contains the id of its response and the item's index there, so
that no table of items is needed."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from radixrt.frontend.http.errors import ApiError

Item = dict[str, Any]
RESPONSE = "resp_"
_ID = re.compile(r"[a-z]+_([0-9a-f]{32})_([0-9]{1,6})")


def item_id(prefix: str, response_id: str, index: int) -> str:
    """The id of the `index`-th item of a response's output."""
    return f"{prefix}{response_id.removeprefix(RESPONSE)}_{index}"


def is_reference(item: Item) -> bool:
    """Whether an item is a reference, whose `type` may be missing."""
    return item.get("type") == "item_reference" or item.keys() == {"id"}


async def resolved(items: list[Item], body_of: Callable[[str], Awaitable[bytes | None]]) -> list[Item]:
    """The items, with references replaced by the items that they name. `body_of` returns the JSON of a stored response.
    Raises ApiError (404) if there is no such item."""
    outputs: dict[str, list[Item]] = {}
    found = []
    for i, item in enumerate(items):
        if is_reference(item):
            found.append(await _named(f"input[{i}].id", item.get("id"), outputs, body_of))
        else:
            found.append(item)
    return found


async def _named(
    field: str, name: Any, outputs: dict[str, list[Item]], body_of: Callable[[str], Awaitable[bytes | None]]
) -> Item:
    place = _ID.fullmatch(name) if isinstance(name, str) else None
    if place is not None:
        response, index = RESPONSE + place[1], int(place[2])
        if response not in outputs:
            body = await body_of(response)
            outputs[response] = msgspec.json.decode(body)["output"] if body else []
        if index < len(outputs[response]) and outputs[response][index]["id"] == name:
            return outputs[response][index]
    raise ApiError(404, f"{field}: there is no item {name!r} here, or its response is no longer kept", field)
