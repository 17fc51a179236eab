"""What is written down of a run of the tests that need a GPU."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from tests.gpu.run import KERNELS, OF_SEVERAL_GPUS, ROOT

FILE = """
import pytest

@pytest.mark.parametrize("number", range(3))
def test_passes(number):
    pass

def test_fails():
    assert 1 == 2, "sums differ"

@pytest.fixture
def broken():
    yield
    raise ValueError("left behind")

def test_fails_at_its_end(broken):
    pass

@pytest.mark.skipif(True, reason="fewer than two GPUs")
def test_is_skipped():
    pass
"""


@pytest.mark.slow
def test_a_run_is_written_down(tmp_path):
    """Each test once, of whichever process; why tests failed and were skipped; when, where and with what."""
    (tmp_path / "test_some.py").write_text(FILE)
    (tmp_path / "test_wrong.py").write_text("import nothing_of_this_name\n")
    paths = [str(tmp_path / name) for name in ("test_some.py", "test_wrong.py")]
    flags = ["--processes", "2", "--out", str(tmp_path / "out.json"), "--continue-on-collection-errors"]
    command = [sys.executable, "-m", "tests.gpu.run", *flags, "-p", "no:langsmith_plugin", *paths]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    (file,) = (counts for path, counts in found["files"].items() if path.endswith("test_some.py"))
    assert [file[name] for name in ("passed", "failed", "skipped")] == [3, 2, 1] and file["seconds"] >= 0
    assert (found["passed"], found["failed"], found["skipped"]) == (3, 2, 1)
    reasons = {each["test"].rpartition("::")[2].rpartition("/")[2]: each["error"] for each in found["failures"]}
    assert "sums differ" in reasons["test_fails"] and "left behind" in reasons["test_fails_at_its_end"]
    assert "nothing_of_this_name" in reasons["test_wrong.py"]
    assert found["skipped_because"] == {"fewer than two GPUs": 1}
    assert found["processes"] == 2 and found["ended"] == "tests_failed" and found["versions"]["torch"]
    assert "sums differ" in done.stdout


def test_files_that_are_run_are_there():
    kernels = [ROOT / f"tests/worker/cuda/test_{name}.py" for name in KERNELS]
    assert all(path.is_file() for path in (*kernels, *(ROOT / name for name in OF_SEVERAL_GPUS)))


def test_kernels_that_take_a_device_are_run_on_one():
    """All files whose tests take the fixture `device`, but for one, whose tests skip themselves on a GPU."""
    takes = re.compile(r"^def test_\w+\(.*\bdevice\b", re.MULTILINE)
    files = (ROOT / "tests/worker/cuda").glob("test_*.py")
    taking = {path.stem.removeprefix("test_") for path in files if takes.search(path.read_text())}
    assert taking - {"pieces"} <= set(KERNELS) and len(taking) > 10
