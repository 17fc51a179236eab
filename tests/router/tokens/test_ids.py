"""Token ids in JSON, against Python's own parser."""

from __future__ import annotations

import json
from array import array

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from radixrt.router.tokens import parse_ids


@given(st.lists(st.integers(0, (1 << 31) - 1), min_size=1), st.sampled_from([None, 1, "\t"]))
def test_lists_of_ids(ids, indent):
    assert parse_ids(json.dumps(ids, indent=indent).encode()) == array("i", ids).tobytes()


@given(st.text(alphabet='[]0123456789,-.eE \n\tx"{}'))
@example("[0]")
@example("[]")
@example("[01]")
@example("[2147483648]")
@example("[99999999999999999999999]")
@example("[1,]")
@example("[1 2]")
@example("[1]]")
@example("[1")
def test_anything_else_is_none(text):
    try:
        ids = json.loads(text)
        plain = isinstance(ids, list) and ids and all(type(i) is int and 0 <= i < 1 << 31 for i in ids)
    except ValueError:
        plain = False
    found = parse_ids(text.encode())
    if "-0" in text and found is None:
        return  # JSON's minus zero is Python's business
    assert found == (array("i", ids).tobytes() if plain else None)


def test_only_bytes():
    with pytest.raises(TypeError):
        parse_ids("[1]")
