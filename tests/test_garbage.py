"""The collector, and the heap, of a process that serves."""

from __future__ import annotations

import gc
import platform
import subprocess
import sys

import pytest

from radixrt.process.gc_tuning import held

CODE = """
import gc
from radixrt.process.gc_tuning import settle

table = [[] for _ in range(10_000)]
settle()
frozen = gc.get_freeze_count()
assert frozen > 10_000 and not any(one is table for one in gc.get_objects())
assert gc.isenabled() and gc.get_threshold()[0] > 700

class Node:
    dead = False
    def __del__(self):
        Node.dead = True

node = Node()
node.itself = node
del node
gc.collect()
assert Node.dead, "what comes later is collected"
"""


def test_what_lives_at_the_start_is_never_looked_at_again():
    subprocess.run([sys.executable, "-c", CODE], check=True, timeout=60)


BLOCKS = """
import resource
from radixrt.process.gc_tuning import keep_heap

def step():
    blocks = [b"." * (4 << 20) for _ in range(6)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

keep_heap()
step()
before = step()
after = [step() for _ in range(5)][-1]
assert after - before < 1000, "24 MB are some 6,000 pages"
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="others have no such setting")
def test_what_is_freed_is_there_for_the_next_step():
    subprocess.run([sys.executable, "-c", BLOCKS], check=True, timeout=60)


class Node:
    """A cycle: gone when the collector has come by."""

    dead = 0

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        Node.dead += 1


def test_nothing_is_collected_while_it_is_held():
    Node.dead = 0
    Node()
    with held():
        assert Node.dead == 1, "what was garbage is gone"
        Node()
        young = [[] for _ in range(gc.get_threshold()[0] + 1)]
        assert Node.dead == 1 and young
    assert gc.isenabled()
    gc.collect()
    assert Node.dead == 2
    gc.disable()
    try:
        with held():
            pass
        assert not gc.isenabled(), "as it was before"
    finally:
        gc.enable()
