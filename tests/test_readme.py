"""What the README and docs/programs.md say can be done, done."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from radixrt.client.local import LocalStack
from radixrt.config import FrontendConfig, RouterConfig, StackConfig, WorkerConfig, resolve
from radixrt.frontend.server import FrontendThread
from radixrt.process.ports import free_tcp_address
from tests.documents import ROOT, blocks

README, PROGRAMS = ROOT / "README.md", ROOT / "docs/programs.md"
QUESTION = re.search(r'radixrt run ask.py "(.*?)"', README.read_text())[1]


@pytest.fixture(scope="module")
def addresses():
    """(ZMQ, HTTP) of a running stack."""
    stack = StackConfig(resolve(RouterConfig("nano")), WorkerConfig("nano", device="cpu"), FrontendConfig())
    with LocalStack(stack, client_address=free_tcp_address()) as running:
        frontend = FrontendThread(resolve(FrontendConfig("nano", router=running.address, port=0)))
        yield running.address, frontend.url
        frontend.stop()


def run(code: str, *command: str, addresses: tuple[str, str]) -> str:
    zmq, http = addresses
    code = code.replace("tcp://127.0.0.1:5555", zmq).replace("http://localhost:8000", http)
    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
        file.write(code)
        file.flush()
        words = [sys.executable, *command, file.name, QUESTION]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def block(part: str, page: Path = PROGRAMS, language: str = "python") -> str:
    return next(b for b in blocks(page, language) if part in b)


def test_the_openai_client(addresses):
    assert run(block("import OpenAI"), addresses=addresses).split()[-1].isdigit()


def test_the_native_client(addresses):
    said = run(block("import Client"), addresses=addresses)
    assert "4817" in said and "worker-0" in said


@pytest.mark.parametrize("page", [README, PROGRAMS], ids=lambda page: page.name)
def test_the_program(addresses, page):
    code = block("@program", page)
    said = run(code, "-m", "radixrt", "run", "--url", addresses[0], addresses=addresses)
    assert "Mia Bren" in said


def test_the_tools(addresses):
    said = run(block("run_tools"), "-m", "radixrt", "run", "--url", addresses[0], addresses=addresses)
    assert "147" in said


def test_curl(addresses):
    import httpx

    command = block("curl", README, "sh")
    route = re.search(r"curl localhost:8000(\S+)", command)[1]
    body = re.search(r"-d '(.*?)'", command)[1]
    answer = httpx.post(addresses[1] + route, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 200 and answer.text.rstrip().endswith("data: [DONE]")
    chunks = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    assert "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks).startswith("I can")


def test_every_file_of_the_gpu_is_in_its_readme():
    folder = ROOT / "radixrt/worker/cuda"
    linked = set(re.findall(r"\]\(([\w/]+\.py)\)", (folder / "README.md").read_text()))
    assert linked == {p.relative_to(folder).as_posix() for p in folder.rglob("*.py") if p.name != "__init__.py"}
