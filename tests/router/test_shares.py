"""Who has most, against a dictionary that is looked through."""

from __future__ import annotations

import random

import pytest

from radixrt.tokens.quota import SPARE, Shares


def test_the_largest_is_the_largest():
    rng, shares, sizes = random.Random(0), Shares(), {}
    most = 0
    for _ in range(20_000):
        tenant = f"t{rng.randrange(rng.choice((2, 30)))}"
        size = rng.choice((1, 5, 100, -sizes.get(tenant, 0), -rng.randrange(sizes.get(tenant, 0) + 1)))
        shares.add(tenant, size)
        sizes[tenant] = sizes.get(tenant, 0) + size
        sizes = {one: size for one, size in sizes.items() if size}
        most = max(most, len(sizes))
        if sizes and rng.random() < 0.5:
            assert shares.largest() == min(sizes, key=lambda one: (-sizes[one], one))
        assert shares[tenant] == sizes.get(tenant, 0) and shares.total == sum(sizes.values())
        assert len(shares._heap) <= 2 * most + SPARE
    shares.check()


def test_nobody_has_anything():
    shares = Shares()
    shares.add("a", 3)
    shares.add("a", -3)
    shares.check()
    with pytest.raises(IndexError):
        shares.largest()


def test_taking_from_the_largest_takes_few_steps():
    """However many have something, and all as much: entries that are looked at when each gives a little, in turn."""
    looked = {}
    for count in (100, 1600):
        shares = Shares()
        for number in range(count):
            shares.add(f"t{number}", 1000)

        class Counted(list):
            reads = 0

            def __getitem__(self, at):
                Counted.reads += 1
                return super().__getitem__(at)

        shares._heap = Counted(shares._heap)
        for _ in range(1000):
            shares.add(shares.largest(), -1)
        looked[count] = Counted.reads / 1000
    assert looked[1600] <= looked[100] * 1.5 < 12
