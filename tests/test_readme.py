"""What the README says can be done, done."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from radixrt.client.local import LocalStack
from radixrt.config import FrontendConfig, RouterConfig, StackConfig, WorkerConfig, resolve
from radixrt.frontend.server import FrontendThread
from radixrt.process.ports import free_tcp_address

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
QUESTION = re.search(r'radixrt run ask.py "(.*?)"', README)[1]
BLOCKS = re.findall(r"```(?:python)?\n(.*?)```", README, re.DOTALL)


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
    path = ROOT / ".demo" / "readme.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text(code)
    done = subprocess.run([sys.executable, *command, str(path), QUESTION], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def block(part: str) -> str:
    return next(b for b in BLOCKS if part in b)


def test_the_openai_client(addresses):
    assert run(block("import OpenAI"), addresses=addresses).split()[-1].isdigit()


def test_the_native_client(addresses):
    said = run(block("import Client"), addresses=addresses)
    assert "4817" in said and "worker-0" in said


def test_the_program(addresses):
    code = block("@program")
    said = run(code, "-m", "radixrt", "run", "--url", addresses[0], addresses=addresses)
    assert "Mia Bren" in said


def test_the_tools(addresses):
    said = run(block("run_tools"), "-m", "radixrt", "run", "--url", addresses[0], addresses=addresses)
    assert "147" in said


def test_curl(addresses):
    import httpx

    route = re.search(r"curl localhost:8000(\S+)", README)[1]
    body = re.search(r"-d '(.*?)'", README)[1]
    answer = httpx.post(addresses[1] + route, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 200 and answer.text.rstrip().endswith("data: [DONE]")
    chunks = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    assert "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks).startswith("I can")


def test_every_file_of_the_gpu_is_in_its_readme():
    folder = ROOT / "radixrt/worker/cuda"
    linked = set(re.findall(r"\]\(([\w/]+\.py)\)", (folder / "README.md").read_text()))
    assert linked == {p.relative_to(folder).as_posix() for p in folder.rglob("*.py") if p.name != "__init__.py"}


def test_links_lead_somewhere():
    for name, least in (("README.md", 15), ("bench/README.md", 1), ("radixrt/worker/cuda/README.md", 25)):
        path = ROOT / name
        links = re.findall(r"\]\((?!http)([^)]+)\)", path.read_text())
        assert len(links) >= least and all((path.parent / link).exists() for link in links), name
    bench = (ROOT / "bench/README.md").read_text()
    results = set(re.findall(r"`(?:bench/results/)?(\w+\.json)`", README + bench))
    missing = {name for name in results if not (ROOT / "bench/results" / name).exists()}
    assert len(results) > 10 and missing == {"config.json", "generation_config.json"}  # of a model
