"""The examples, as users run them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from radixrt.client import Client
from radixrt.config import FrontendConfig, RouterConfig, WorkerConfig, resolve
from radixrt.launch import LocalStack, StackConfig, free_tcp_address

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))


@pytest.fixture(scope="module")
def address(folder):
    address = free_tcp_address()
    router = resolve(RouterConfig(model=str(folder), served_model_name="m"))
    worker = WorkerConfig(model=str(folder), fake="0,0", served_model_name="m")
    with LocalStack(StackConfig(router, worker, FrontendConfig(), workers=2), client_address=address):
        yield address


def command(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "radixrt", *arguments], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(address, example):
    done = command("run", "--url", address, str(example))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    with Client(address) as client:
        assert any(row["program"] == example.stem.removesuffix("_agent") for row in client.report()["programs"])


def test_arguments_and_errors(address, tmp_path):
    path = tmp_path / "prog.py"
    path.write_text(
        "import sys\n"
        "from radixrt import gen, program\n"
        "@program\n"
        "def p(s, top_p):\n"
        "    s += 'text'\n"
        "    s += gen('x', top_p=top_p, max_tokens=3)\n"
        "    return s['x']\n"
        "print('said', repr(p.run(float(sys.argv[1]))))\n"
    )
    fine = command("run", "--url", address, str(path), "0.9")
    assert fine.returncode == 0 and fine.stdout.startswith("said")
    bad = command("run", "--url", address, str(path), "7")
    assert bad.returncode == 1 and "prog.py:6: top_p must be in (0, 1]" in bad.stderr
    assert "s += gen('x', top_p=top_p, max_tokens=3)" in bad.stderr and "Traceback" not in bad.stderr
    nobody = command("run", "--url", free_tcp_address(), str(path), "0.9")
    assert nobody.returncode == 2 and "nobody answers" in nobody.stderr


def test_report_on_the_terminal(address):
    table = command("report", "--url", address)
    assert table.returncode == 0 and "hit rate" in table.stdout and "infinite" in table.stdout
    assert command("report", "--url", address, "--json").stdout.startswith("{")
