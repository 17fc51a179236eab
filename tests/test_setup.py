"""What an installation says that lacks something."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_a_missing_compiler_is_named_with_what_to_install(tmp_path):
    pytest.importorskip("setuptools")
    command = [sys.executable, "setup.py", "-q", "build_ext", "--force", f"-b{tmp_path}", f"-t{tmp_path}"]
    env = {name: value for name, value in os.environ.items() if name not in ("CC", "CXX")} | {"PATH": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 1 and "apt install g++ python3-dev" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr and not list(tmp_path.rglob("*.so"))
