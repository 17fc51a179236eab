"""The collector of a process that serves."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import gc
from radixrt.garbage import settle

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
