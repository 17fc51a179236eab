"""Token ids in JSON, against Python's own parser."""

from __future__ import annotations

import importlib.util
import json
import random
import subprocess
import sysconfig
from array import array
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from radixrt import tokens
from radixrt.tokens import cut_ids, ids_below

SOURCE = Path(tokens.__file__).parent / "ids.cpp"


@pytest.fixture(scope="module", params=["as built", "without AVX2"])
def parse_ids(request, tmp_path_factory):
    """The parser, also as it is on processors that have fewer instructions."""
    if request.param == "as built":
        return tokens.parse_ids
    path = tmp_path_factory.mktemp("built") / "_ids.so"
    options = ["-std=c++17", "-O1", "-shared", "-fPIC", "-DRADIXRT_NO_AVX2", f"-I{sysconfig.get_path('include')}"]
    subprocess.run(["c++", *options, str(SOURCE), "-o", str(path)], check=True)
    spec = importlib.util.spec_from_file_location("_ids", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.parse_ids


@given(st.lists(st.integers(0, (1 << 31) - 1), min_size=1), st.sampled_from([None, 1, "\t"]))
def test_lists_of_ids(parse_ids, ids, indent):
    assert parse_ids(json.dumps(ids, indent=indent).encode()) == array("i", ids).tobytes()


@given(
    st.lists(st.integers(1, 9).flatmap(lambda digits: st.integers(0, 10**digits - 1)), min_size=1), st.integers(0, 9)
)
def test_ids_of_few_digits(parse_ids, ids, spaces):
    text = "[" + f",{' ' * spaces}".join(map(str, ids)) + "]" + " " * spaces
    assert parse_ids(text.encode()) == array("i", ids).tobytes()


@pytest.mark.parametrize(
    "behind", ["", ",1]", "       ", "        ", "x,1,1,1,1]", "\u00ff,1,1,1]", "-,1,1,1,1]", "/]", ":]"]
)
@pytest.mark.parametrize(
    "number", ["7", "0", "00", "012345", "1234567", "12345678", "2147483647", "2147483648", "/", ":"]
)
def test_what_stands_behind_a_number(parse_ids, number, behind):
    text = f"[3,{number}{behind}"
    try:
        ids = json.loads(text)
    except ValueError:
        ids = [-1]
    plain = min(ids) >= 0 and max(ids) < 1 << 31
    assert parse_ids(text.encode()) == (array("i", ids).tobytes() if plain else None)


def expected(text: bytes) -> bytes | None:
    """What Python's parser makes of a list of ids."""
    try:
        ids = json.loads(text)
    except ValueError:
        return None
    plain = isinstance(ids, list) and ids and all(type(i) is int and 0 <= i < 1 << 31 for i in ids)
    return array("i", ids).tobytes() if plain else None


ODD = [
    b"", b",", b", ", b",  ", b" ,", b",,", b" ", b"\n", b"0", b"00", b"7", b"12345678", b"123456789", b"2147483647",
    b"2147483648", b"9" * 70, b"0" * 70, b" " * 70, b"-", b"-1", b"+1", b"1.0", b"1e3", b"/", b":", b"\0", b"\xff",
    b"\xac", b"\xb0", b"[1]", b"[", b"]", b'"1"', b"null", b"{}",
]  # fmt: skip
"""What stands in few lists of ids, or in none."""


@pytest.mark.parametrize("seed", range(100))
def test_long_lists_and_what_one_wrong_byte_makes_of_them(parse_ids, seed):
    """Everything that can stand across the end of a block of bytes that are looked at together."""
    draw = random.Random(seed)
    comma = [",", ", ", " ,", ",\n\t", ",\r\n  "][: draw.randint(1, 5)]
    ids = [str(draw.randrange(10 ** draw.randint(1, 9))) for _ in range(draw.randint(1, 90))]
    text = "[" + " " * draw.randint(0, 70) + "".join(one + draw.choice(comma) for one in ids[:-1]) + ids[-1]
    text = bytearray((text + " " * draw.randint(0, 70) + "]").encode())
    assert parse_ids(text) == expected(text)
    for _ in range(20):
        place, byte = draw.randrange(len(text)), draw.choice(b"0123456789,, ]x-/:")
        kept, text[place] = text[place], byte
        found = parse_ids(text)
        assert found == expected(text) or (found is None and b"-0" in text), bytes(text)
        text[place] = kept


@pytest.mark.parametrize("seed", range(100))
def test_lists_that_are_written_alike_throughout(parse_ids, seed):
    """As most are, and what else there may be in one place of them."""
    draw = random.Random(seed)
    comma, most = draw.choice([",", ", "]), draw.randint(1, 9)
    for _ in range(3):
        ids = [str(draw.randrange(10 ** draw.randint(1, most))) for _ in range(draw.randint(1, 300))]
        text = draw.choice([b"[", b" [ "]) + comma.join(ids).encode() + b"]"
        assert parse_ids(text) == expected(text)
        for _ in range(20):
            other = draw.choice(ODD)
            begin = draw.randrange(len(text))
            changed = text[:begin] + other + text[begin + draw.randint(0, 2) :]
            found = parse_ids(changed)
            assert found == expected(changed) or (found is None and b"-0" in changed), changed
        cut = text[: draw.randrange(len(text))]
        assert parse_ids(cut) is None


def test_a_list_that_is_mostly_space(parse_ids):
    """Its first part has all ids, or all but one: the others are empty."""
    for spaces in (400, 1000):
        text = "[" + "1," * 60 + " " * spaces + "2" + " " * spaces + "]"
        assert parse_ids(text.encode()) == array("i", [1] * 60 + [2]).tobytes()


int32s = st.integers(-(1 << 31), (1 << 31) - 1)


@given(st.lists(st.integers(0, 600), max_size=40), st.lists(int32s, max_size=1), st.integers(1, 600) | st.just(1 << 31))
@example([], [], 1)
@example([(1 << 31) - 1], [], 1 << 31)
@example([], [-1], 1 << 31)
@example([511], [], 512)
@example([512], [], 512)
def test_ids_are_below_a_limit(ids, odd, limit):
    ids = [*ids, *odd, *ids]
    assert ids_below(array("i", ids).tobytes(), limit) == all(0 <= i < limit for i in ids)


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
def test_anything_else_is_none(parse_ids, text):
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
        tokens.parse_ids("[1]")


# ---------------------------------------------------------------- in an object

_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=3,
)
_names = st.sampled_from(["a", "ids", "b", "[", "]", ",", "}", "ids: [1]"])
_ids = st.lists(st.integers(0, (1 << 31) - 1), min_size=1, max_size=5)


@given(st.dictionaries(_names, _values, max_size=4), _ids, st.integers(0, 4), st.sampled_from([None, 1, "\t"]))
def test_a_list_is_cut_out_of_an_object(fields, ids, place, indent):
    fields.pop("ids", None)
    fields = list(fields.items())
    fields.insert(place, ("ids", ids))
    rest, found = cut_ids(json.dumps(dict(fields), indent=indent).encode(), "ids")
    assert found == array("i", ids).tobytes()
    assert json.loads(rest) == dict(fields) | {"ids": None}


@given(st.dictionaries(_names, _values, max_size=4))
def test_other_values_stay(fields):
    text = json.dumps(fields).encode()
    wanted = tokens.parse_ids(json.dumps(fields.get("ids")).encode())
    found = cut_ids(text, "ids")
    assert (found and found[1]) == wanted


@given(st.dictionaries(_names, _values, max_size=3), _ids, st.integers(0, 200), st.integers(0, 255))
def test_broken_json_stays_broken(fields, ids, place, byte):
    text = bytearray(json.dumps(fields | {"ids": ids}).encode())
    text[place % len(text)] = byte
    if (found := cut_ids(bytes(text), "ids")) is None:
        return
    try:
        whole = json.loads(text)
    except ValueError:
        with pytest.raises(ValueError):
            json.loads(found[0])
    else:
        assert whole | {"ids": None} == json.loads(found[0])
        assert array("i", whole["ids"]).tobytes() == found[1]


@pytest.mark.parametrize(
    "text",
    [
        '{"ids": [1], "ids": [2]}', '{"ids": 3, "ids": [2]}', '{"ids": [2], "ids": 3}', '{"ids": [1], "\\u0069ds": 4}',
        '{"ids": [1]', '{"ids": [1}', '{"ids" [1]}', '["ids", [1]]', '{"a": {"ids": [1]}}', '{"a": "\\"ids\\": [1]"}',
        "", '{"ids"', '{"ids": []}',
    ],
)  # fmt: skip
def test_what_is_in_doubt_is_left_to_the_parser(text):
    assert cut_ids(text.encode(), "ids") is None
