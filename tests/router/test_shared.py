"""What front ends share, by the router's memory of it."""

from __future__ import annotations

import asyncio
import random

from radixrt.router.persistence.store import PersistentStore
from radixrt.router.server.kv_store import ENTRY_BYTES, SharedMemory


def test_values_are_of_a_tenant():
    memory = SharedMemory(10_000)
    memory.put("a", b"k", b"1")
    assert memory.get("a", b"k") == b"1" and memory.get("b", b"k") is None
    memory.put("a", b"k", b"22")
    assert memory.get("a", b"k") == b"22" and memory.num_bytes == 3 + ENTRY_BYTES
    memory.put("b", b"k", None)
    memory.put("a", b"k", None)
    assert memory.get("a", b"k") is None and memory.num_bytes == 0


def test_the_tenant_with_most_loses_its_oldest():
    memory = SharedMemory(5 * (101 + ENTRY_BYTES))
    for key in (b"1", b"2", b"3", b"4"):
        memory.put("a", key, b"x" * 100)
    memory.put("b", b"1", b"x" * 100)
    memory.get("a", b"1")
    memory.put("b", b"2", b"x" * 100)
    assert [memory.get("a", key) is not None for key in (b"1", b"2", b"3", b"4")] == [True, False, True, True]
    assert memory.get("b", b"1") and memory.get("b", b"2")


def test_more_than_there_is_room_for_is_not_kept():
    memory = SharedMemory(1000)
    memory.put("a", b"k", b"x" * 2000)
    assert memory.get("a", b"k") is None and memory.num_bytes == 0
    memory.put("a", b"k" * 2000, b"")
    assert memory.get("a", b"k" * 2000) is None and memory.num_bytes == 0, "nor a key"
    off = SharedMemory(0)
    off.put("a", b"k", b"")
    assert off.get("a", b"k") is None


def test_sizes_add_up():
    rng = random.Random(0)
    memory, kept = SharedMemory(6000), {}
    for _ in range(3000):
        tenant, key = rng.choice("abc"), bytes([rng.randrange(8)])
        value = rng.choice([None, rng.randbytes(rng.randrange(600))])
        memory.put(tenant, key, value)
        kept[tenant, key] = value
        kept = {place: memory.get(*place) for place, last in kept.items() if memory.get(*place) is not None}
        assert value is None or kept.get((tenant, key), value) == value
        assert memory.num_bytes == sum(1 + len(v) + ENTRY_BYTES for v in kept.values()) <= 6000


def test_what_was_used_is_dropped_last():
    """Also where those that share it have it already, and do not ask for it."""
    memory = SharedMemory(3 * (11 + ENTRY_BYTES))
    for key in (b"1", b"2", b"3"):
        memory.put("a", key, b"x" * 10)
    memory.touch("a", [b"1", b"9"])
    memory.put("a", b"4", b"x" * 10)
    assert [memory.get("a", key) is not None for key in (b"1", b"2", b"3", b"4")] == [True, False, True, True]


def test_values_that_memory_has_no_room_for_are_found_on_disk(tmp_path):
    store = PersistentStore(tmp_path, 64 << 20)
    memory = SharedMemory(3 * (11 + ENTRY_BYTES), store)
    keys = [b"%d" % i for i in range(9)] + [b"long" * 100]
    for key in keys:
        memory.put("a", key, b"of " + key[:8])
    memory.put("a", b"3", None)
    for again in (memory, SharedMemory(0, store)):
        found = asyncio.run(again.find("a", keys))
        assert found == [None if key == b"3" else b"of " + key[:8] for key in keys]
        assert asyncio.run(again.find("b", keys)) == [None] * 10
    store.close()
