"""A GPU whose context is broken, in a process of its own."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import os
from types import SimpleNamespace

import torch

from radixrt.worker.execution.torch_runner import ModelRunner

runner = SimpleNamespace(_device=torch.device("cuda"))
assert ModelRunner.works(runner)
try:
    torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError:
    pass
assert ModelRunner.works(runner), "want of memory passes"
torch.zeros(4, device="cuda")[torch.tensor([9], device="cuda")]
assert not ModelRunner.works(runner) and not ModelRunner.works(runner)
os._exit(0)
"""


def test_errors_that_stay_are_told_from_those_that_pass():
    assert subprocess.run([sys.executable, "-c", PROGRAM], check=False).returncode == 0
