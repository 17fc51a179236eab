"""Stores with a key: nothing that tenants said can be read without it."""

from __future__ import annotations

import numpy as np
import pytest

from radixrt.worker.disk import NewBlock
from tests.waiting import eventually
from tests.worker.disk.stores import content, drained, got, ids_of, opened, put, segments

pytest.importorskip("cryptography")

KEY, OTHER = b"a key of 16 bytes or more", b"another key of 16 bytes"
SPACE = "tenant with a name\nmodel\n\n"


def test_rows_ids_and_namespaces_cannot_be_read_in_the_files(tmp_path):
    store = opened(tmp_path, key=KEY)
    ids = ids_of(*range(7000, 7100))
    rows = np.tile(np.frombuffer(b"0123456789", np.uint8), (4, 100)).copy()
    job = store.write(NewBlock("kv", SPACE, None, 0, ids, 0.0), rows, range(4))
    drained(store)
    np.testing.assert_array_equal(got(store, job.number), rows)
    store.close()
    held = b"".join(x.read_bytes() for x in tmp_path.rglob("*") if x.is_file())
    assert len(held) > 4000
    for text in (b"0123456789", ids[:16], b"tenant with", KEY):
        assert text not in held


def test_with_another_key_or_none_nothing_is_there_and_the_right_one_still_works(tmp_path):
    store = opened(tmp_path, key=KEY)
    job, path = put(store, NewBlock("kv", SPACE, None, 0, ids_of(1), 0.0))
    drained(store)
    store.close()
    for key in (OTHER, None):
        store = opened(tmp_path, key=key)
        assert store.blocks() == [] and got(store, job.number) is None
        store.close()
    store = opened(tmp_path, key=KEY)
    (block,) = store.blocks()
    assert block.namespace == SPACE and block.ids == ids_of(1)
    np.testing.assert_array_equal(got(store, job.number), content(path, 4))
    store.close()


def test_a_changed_byte_is_a_miss(tmp_path):
    store = opened(tmp_path, key=KEY)
    jobs = [put(store, NewBlock("kv", SPACE, None, 0, ids_of(i), 0.0))[0] for i in range(3)]
    drained(store)
    (path,) = segments(tmp_path)
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    data[4096 + 4000 + 3] ^= 1  # of the second's tag
    path.write_bytes(data)
    assert [got(store, x.number) is None for x in jobs] == [True, True, False]
    store.close()


def test_a_tenants_deletion_takes_blocks_under_keys_that_are_not_known(tmp_path):
    stores = [opened(tmp_path, key=x) for x in (KEY, OTHER, None)]
    for store in stores:
        for space in (SPACE, "somebody\nelse\n\n"):
            put(store, NewBlock("kv", space, None, 0, ids_of(1), 0.0))
        drained(store)
    assert stores[0].delete_namespaces("tenant with a name\n")
    drained(stores[0])
    left = [opened(tmp_path, key=x) for x in (KEY, OTHER, None)]
    assert [len(x.blocks()) for x in left] == [1, 0, 1]
    eventually(lambda: stores[0].used == 8192)
    for store in stores + left:
        store.close()


@pytest.mark.parametrize("key", [b"", b"short"])
def test_a_short_key_is_refused(tmp_path, key):
    with pytest.raises(ValueError, match="kv_disk_key_file"):
        opened(tmp_path, key=key)


def test_without_the_package_a_key_is_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "cryptography.hazmat.primitives.ciphers.aead", None)
    with pytest.raises(ValueError, match=r"kv_disk_key_file: pip install 'radixrt\[encryption\]'"):
        opened(tmp_path, key=KEY)
