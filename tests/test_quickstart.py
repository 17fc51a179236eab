"""The quick start of the README, word for word: its shell blocks, in a network of their own, and its program."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.documents import ROOT, blocks

README = ROOT / "README.md"
NOT_RUN = {
    "python3 -m venv": "it installs from an index of torch's",
    "radixrt serve smollm2": "it downloads a model; nano serves in its place",
}
"""Beginnings of blocks, and why they are not run."""
pytestmark = pytest.mark.slow  # the server and two programs start: 15 seconds on two shared cores
OWN_NETWORK = ["unshare", "--net", "--map-root-user"]
WAIT = "until curl -sf localhost:8000/health > /dev/null; do kill -0 $! || exit 1; sleep 0.1; done"


def script(steps: list[str]) -> str:
    """The blocks one after the other; what serves, in the background until it answers."""
    lines = ["set -e", "ip link set lo up"]
    for step in steps:
        lines += [f"({step.strip()}) > server.log 2>&1 &", WAIT] if step.startswith("radixrt serve") else [step]
    return "\n".join([*lines, "kill $!", "wait"])


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the quick start prints."""
    if shutil.which("curl") is None or shutil.which("ip") is None:
        pytest.skip("curl and ip are needed")
    if subprocess.run([*OWN_NETWORK, "ip", "link", "set", "lo", "up"], capture_output=True).returncode:
        pytest.skip("no network namespaces here: ports 8000 and 5555 may be in use")
    folder = tmp_path_factory.mktemp("quickstart")
    (program,) = blocks(README, "python")
    (folder / "ask.py").write_text(program)
    steps = [block for block in blocks(README, "sh") if not block.startswith(tuple(NOT_RUN))]
    assert len(steps) == len(blocks(README, "sh")) - len(NOT_RUN)
    places = [str(Path(sys.executable).parent), os.environ["PATH"]]
    environment = os.environ | {"PATH": os.pathsep.join(places), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*OWN_NETWORK, "bash", "-c", script(steps)],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr + (folder / "server.log").read_text()
    return done.stdout


def test_the_server_answers_curl_in_a_stream(said: str) -> None:
    assert said.startswith("data: {") and "data: [DONE]" in said


def test_the_program_answers_and_the_report_shows_its_hits(said: str) -> None:
    assert "Mia Bren" in said
    (sample,) = blocks(README, "text")
    labels = [re.split(r"\s{2,}", line)[0] for line in sample.splitlines() if re.match(r"[a-z]", line)]
    assert labels == ["program ask", "program ask, fork depth 1", "computed prompt tokens"]
    assert all(re.search(f"^{label} ", said, re.MULTILINE) for label in labels)
