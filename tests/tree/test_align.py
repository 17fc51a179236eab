"""Where two arrays go on alike, against the same in plain Python."""

from __future__ import annotations

import random
from array import array
from itertools import product

import pytest

from radixrt.tree import common_length, realigned, resembling

Found = tuple[int, int] | None


def to_bytes(tokens: list[int]) -> bytes:
    return array("i", tokens).tobytes()


def plain(one: list[int], other: list[int], at: int, to: int, span: int, anchor: int, least: int) -> Found:
    size = anchor + least
    for skipped in (1, 16, 48, span):
        begin = to + skipped
        if begin + size > len(other):
            return None
        wanted = other[begin : begin + anchor]
        last = min(len(one), at + 2 * span + anchor) - anchor
        found = next((i for i in range(at, last + 1) if one[i : i + anchor] == wanted), None)
        if found is not None and one[found : found + size] == other[begin : begin + size]:
            while found > at and begin > to and one[found - 1] == other[begin - 1]:
                found, begin = found - 1, begin - 1
            return (found, begin) if found - at <= span else None
    return None


@pytest.mark.parametrize("values", [2, 3, 50_000])
def test_as_plain_python(values):
    """Few values make chance matches, many make none."""
    rng = random.Random(values)

    def some(most: int) -> list[int]:
        return [rng.randrange(values) for _ in range(rng.randrange(most))]

    hits = 0
    for _ in range(1500):
        span, anchor, least = rng.choice([4, 40, 128]), rng.choice([1, 4, 16]), rng.choice([0, 5, 64])
        head, trunk = some(20), some(200)
        one = head + some(2 * span) + trunk + some(60)
        other = head + some(2 * span) + trunk[: rng.choice([10, 300])] + some(60)
        at, to = rng.randrange(len(one) + 3), rng.randrange(len(other) + 3)
        if rng.random() < 0.7:
            at = to = len(head)
        found = realigned(to_bytes(one), to_bytes(other), at, to, span, anchor, least)
        expected = plain(one, other, at, to, span, anchor, least) if at <= len(one) and to <= len(other) else None
        assert found == expected
        hits += found is not None
    assert hits > 50


def test_what_stands_behind_an_end_is_not_theirs():
    rng = random.Random(4)
    trunk = [rng.randrange(50_000) for _ in range(40)]
    one, other = [1, 2, *trunk], [3, 4, 5, *trunk]
    for end in range(1, len(one) + 1):
        for other_end in range(1, len(other) + 1):
            views = memoryview(to_bytes(one))[: 4 * end], memoryview(to_bytes(other))[: 4 * other_end]
            assert realigned(*views, 0, 0, 8, 4, 9) == plain(one[:end], other[:other_end], 0, 0, 8, 4, 9)


def test_absurd_counts_read_nothing_else():
    one, huge = to_bytes(list(range(99))), (1 << 63) - 1
    for counts in product((1, huge), repeat=5):
        assert realigned(one, one, *counts) in (None, (1, 1))
    with pytest.raises(ValueError, match="at"):
        realigned(one, one, -1, 1, 1, 1, 1)


@pytest.mark.parametrize("seed", range(60))
def test_what_resembles(seed):
    """Against one after the other."""
    rng = random.Random(seed)
    values = rng.choice([2, 3, 50_000])

    def some(most: int) -> list[int]:
        return [rng.randrange(values) for _ in range(rng.randrange(most))]

    head, trunk = some(400), some(300)
    other = head + some(20) + trunk
    ones = [head + some(20) + trunk[: rng.choice([20, 300])] + some(30) for _ in range(rng.randrange(6))]
    ones += [other[: rng.randrange(len(other) + 1)], other + some(5)]
    rng.shuffle(ones)
    enough, span, anchor, least = rng.randrange(400), rng.choice([4, 128]), rng.choice([1, 4]), rng.choice([0, 16])
    expected = []
    for at, one in enumerate(ones):
        same = common_length(to_bytes(one), to_bytes(other))
        alike = same >= enough and plain(one, other, same, same, span, anchor, least) is not None
        if same == len(one) or alike:
            expected.append((at, same))
    found = resembling([to_bytes(one) for one in ones], to_bytes(other), enough, span, anchor, least)
    assert found == expected


def test_what_cannot_be_compared():
    one = to_bytes([1, 2])
    assert resembling([], one, 0, 1, 1, 1) == []
    for ones in (None, 3, [one, "x"], [one, b"123"]):
        with pytest.raises((TypeError, ValueError)):
            resembling(ones, one, 0, 1, 1, 1)
    with pytest.raises(ValueError, match="negative"):
        resembling([one], one, -1, 1, 1, 1)
    with pytest.raises(TypeError):
        resembling([one], one)
