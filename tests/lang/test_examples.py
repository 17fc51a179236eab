"""The examples, as users run them."""

from __future__ import annotations

import ast
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from radixrt import trace, use_client
from radixrt.client import Client
from radixrt.client.local import LocalStack
from radixrt.config import FrontendConfig, RouterConfig, WorkerConfig, resolve
from radixrt.frontend.server import FrontendThread
from radixrt.launch.launcher import StackConfig
from radixrt.process.ports import free_tcp_address
from tests.checkpoints import make_model
from tests.waiting import eventually

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


@pytest.fixture(scope="module", autouse=True)
def nobody():
    """A program whose server does not answer; it waits for five seconds, while other tests run."""
    arguments = [sys.executable, "-m", "radixrt", "run", "--url", free_tcp_address(), str(EXAMPLES[0])]
    with subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


@pytest.fixture(scope="module")
def clients(folder, address, tmp_path_factory):
    """Of fake workers over ZMQ and HTTP, and of a small random model in this process."""
    model = tmp_path_factory.mktemp("model")
    make_model(model, "llama", num_hidden_layers=1)
    for path in folder.glob("*token*"):
        (model / path.name).write_bytes(path.read_bytes())
    frontend = FrontendThread(resolve(FrontendConfig(model=str(folder), served_model_name="m", router=address, port=0)))
    with Client(address) as zmq, Client(frontend.url) as http, Client(f"local:{model}") as local:
        yield {"zmq": zmq, "http": http, "local": local}
    frontend.stop()


@pytest.mark.parametrize("transport", ["zmq", "http", "local"])
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(clients, example, transport, capsys, monkeypatch):
    """As `radixrt run` does it, in this process, with nothing left running."""
    client = clients[transport]
    monkeypatch.setattr(sys, "argv", [str(example)])
    use_client(client)
    try:
        with trace() as t:
            runpy.run_path(str(example), run_name="__main__")
    finally:
        use_client(None)
    assert capsys.readouterr().out.strip()
    assert t.runs and all(run.program == example.stem and run.usage().completion_tokens for run in t.runs)
    wait_for_runs(client, 0)
    assert any(row["program"] == example.stem for row in client.report()["programs"])


def test_there_are_ten_examples_and_each_says_what_it_is():
    assert len(EXAMPLES) == 10
    for example in EXAMPLES:
        text = example.read_text()
        said = ast.get_docstring(ast.parse(text))
        assert f"radixrt run examples/{example.name}" in said and len(text.splitlines()) < 80


def test_what_examples_compute_themselves():
    names = {path.stem: runpy.run_path(str(path)) for path in EXAMPLES}
    verify = names["best_of_n"]["verify"]
    for code, right in (("sorted([a, b, c])[1]", True), ("a", False), ("(", False), ("a.__class__", False)):
        assert verify("lambda a, b, c: " + code) is right
    left_after = names["tree_of_thought"]["left_after"]
    assert left_after([4, 4, 6, 8], "4 + 8 = 12 (left: 4 6 12)\n") == [4, 6, 12]
    for wrong in ("4 + 9 = 13 (left: 4)\n", "8 / 6 = 1 (left: 4)\n", "6 / 0 = 6 (left: 4)\n", "8 + 8 = 16 (left: 4)\n"):
        assert left_after([4, 4, 6, 8], wrong) is None
    assert names["react_agent"]["calculate"](" 14 - 2*3 ") == "8"


def test_the_command_and_its_trace(address, tmp_path):
    page = tmp_path / "trace.html"
    example = next(path for path in EXAMPLES if path.stem == "best_of_n")
    done = command("run", "--url", address, "--trace", str(page), str(example))
    assert done.returncode == 0 and done.stdout.strip(), done.stderr
    assert "best_of_n: " in page.read_text() and "tool verify" in page.read_text()


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
    assert bad.returncode == 1 and "prog.py:6: top_p must be in" in bad.stderr
    assert "s += gen('x', top_p=top_p, max_tokens=3)" in bad.stderr and "Traceback" not in bad.stderr


@pytest.mark.parametrize("kind", ["tool", "attempt"])
def test_an_error_of_a_programs_own_function_is_shown_with_its_line(address, tmp_path, kind):
    path = tmp_path / "prog.py"
    call = {"tool": "await s.tool(look_up, 'japan')", "attempt": "await race(s.fork(2), attempt)"}[kind]
    path.write_text(
        "from radixrt import program, race\n"
        "def look_up(country):\n"
        "    return {}[country]\n"
        "async def attempt(branch):\n"
        "    return await branch.tool(look_up, 'japan')\n"
        "@program\n"
        "async def p(s):\n"
        "    s += 'text'\n"
        f"    {call}\n"
        "p.run()\n"
    )
    done = command("run", "--url", address, str(path))
    assert done.returncode == 1 and "prog.py:9: " in done.stderr and "KeyError: 'japan'" in done.stderr
    assert f'File "{path}", line 3, in look_up' in done.stderr and "return {}[country]" in done.stderr
    assert ("line 5, in attempt" in done.stderr) == (kind == "attempt")
    assert "radixrt/" not in done.stderr


def test_nobody_answers(nobody):
    assert "nobody answers" in nobody.communicate(timeout=60)[1] and nobody.returncode == 2


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("\n1 / 0", "line 2, in <module>"),
        ("raise ValueError('mine')", "ValueError: mine"),
        ("open('/nowhere')", "FileNotFoundError"),
        ("this is no python", "SyntaxError"),
    ],
)
def test_a_programs_own_errors_are_shown_as_pythons(address, tmp_path, code, said):
    path = tmp_path / "prog.py"
    path.write_text(code)
    done = command("run", "--url", address, str(path))
    assert done.returncode == 1 and said in done.stderr
    assert "radixrt" not in done.stderr.replace(str(path), "") and "runpy" not in done.stderr


def test_a_program_that_is_not_there(address):
    done = command("run", "--url", address, "/nowhere.py")
    assert done.returncode == 2 and done.stderr == "radixrt run: there is no file /nowhere.py\n"


@pytest.mark.parametrize("kind", ["async", "plain", "busy"])
def test_ctrl_c_stops_a_program_and_its_requests(folder, tmp_path, kind):
    path = tmp_path / "prog.py"
    waits = {"async": "await s['x']", "plain": "s['x']", "busy": "__import__('time').sleep(60)"}[kind]
    path.write_text(
        "from radixrt import gen, program\n"
        "@program\n"
        f"{'async ' if kind == 'async' else ''}def p(s):\n"
        "    s += 'text'\n"
        "    for branch in s.fork(3):\n"
        "        branch += gen('x', max_tokens=100_000, ignore_eos=True)\n"
        "    s += gen('x', max_tokens=100_000, ignore_eos=True)\n"
        f"    {waits}\n"
        "p.run()\n"
    )
    with slow_stack(folder) as stack, Client(stack.address) as client:
        arguments = [sys.executable, "-m", "radixrt", "run", "--url", stack.address, str(path)]
        process = subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True)
        wait_for_runs(client, 4)
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=10)[1] == "" and process.returncode == 130
        assert wait_for_runs(client, 0)["counters"]["cancelled"] == 4


def slow_stack(folder) -> LocalStack:
    router = resolve(RouterConfig(model=str(folder), served_model_name="m"))
    worker = WorkerConfig(model=str(folder), fake="0,0.005", served_model_name="m")
    return LocalStack(StackConfig(router, worker, FrontendConfig()), client_address=free_tcp_address())


def wait_for_runs(client: Client, count: int) -> dict:
    return eventually(lambda: (health := client.health())["runs_in_flight"] == count and health)


def test_report_on_the_terminal(address):
    table = command("report", "--url", address)
    assert table.returncode == 0 and "hit rate" in table.stdout and "infinite" in table.stdout
    assert command("report", "--url", address, "--json").stdout.startswith("{")
