"""Workers that hang, workers that are drained and servers that are told to stop, under load: answers are those of an
undisturbed run."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import httpx
import pytest

from radixrt.client import Client, ServerError
from radixrt.client.local import LocalStack
from radixrt.config import FrontendConfig, RouterConfig, StackConfig, WorkerConfig, resolve
from radixrt.frontend.server import FrontendThread
from radixrt.launch import launcher
from radixrt.launch.process_main import say_leave
from radixrt.messages import Sampling
from radixrt.process import subprocesses, watchdog
from radixrt.process.ports import free_tcp_address
from radixrt.process.shutdown import BUSY, DRAINED, DRAINING, IDLE, MAX_LOOK_SECONDS, Ending, Pulse, Pulses
from radixrt.process.subprocesses import Child, stop_subprocesses
from radixrt.worker import loop
from radixrt.worker.execution.fake_runner import FakeRunner, fake_token
from radixrt.worker.status import INCARNATION
from tests.waiting import eventually

LONG = Sampling(max_tokens=100, temperature=0.0, ignore_eos=True)
POISON = 31_999
"""A step with this token does not end."""


def expected(prompt: list[int], count: int = 100) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(fake_token(tokens[-1], len(tokens) - 1, 32_000))
    return tokens[len(prompt) :]


def prompts(count: int) -> list[list[int]]:
    return [[100 + n, 7, 8, 9 + n] for n in range(count)]


def local(workers: int, **router) -> LocalStack:
    worker = WorkerConfig(fake="0,0.004", watchdog_timeout=60.0)
    return LocalStack(StackConfig(resolve(RouterConfig(tokenizer="none", **router)), worker, FrontendConfig(), workers))


@pytest.fixture
def released(monkeypatch) -> Iterator[threading.Event]:
    """Steps of fake workers with POISON end when this is set; heartbeats and limits are short."""
    released, wait = threading.Event(), FakeRunner._wait

    def hang(runner, plan, done_at, read):
        if POISON in plan.tokens:
            released.wait(60)
        return wait(runner, plan, done_at, read)

    monkeypatch.setattr(FakeRunner, "_wait", hang)
    monkeypatch.setattr(loop, "HEARTBEAT_SECONDS", 0.05)
    monkeypatch.setattr(watchdog, "KNOWN_STEPS", 8)
    monkeypatch.setattr(watchdog, "MIN_SECONDS", 0.4)
    monkeypatch.setattr(watchdog, "FACTOR", 1.0)  # steps of a busy machine are long
    yield released
    released.set()


def test_streams_of_a_worker_that_hangs_go_on_elsewhere(released):
    """And the worker serves again when its step has ended after all."""
    asked = prompts(6)
    with local(3) as stack, Client(stack.address) as client, ThreadPoolExecutor(8) as pool:
        found = [pool.submit(client.generate, prompt, LONG) for prompt in asked]
        eventually(lambda: all(w["requests"] and w["running"] for w in client.health()["workers"]))
        time.sleep(0.1)  # some steps, so that their time is known
        hanging = pool.submit(client.generate, [POISON], Sampling(max_tokens=1))
        assert [answer.result(60).token_ids for answer in found] == [expected(prompt) for prompt in asked]
        eventually(lambda: client.health()["stuck"])
        released.set()
        eventually(lambda: not client.health()["stuck"] and len(client.health()["workers"]) == 3)
        with contextlib.suppress(ServerError):  # three workers hung on it
            hanging.result(60)
        assert client.generate(asked[0], LONG).token_ids == expected(asked[0])


def test_a_worker_is_drained_under_load():
    """What runs there finishes there, new requests go elsewhere, and it leaves."""
    asked = prompts(12)
    with local(2) as stack, Client(stack.address) as client, ThreadPoolExecutor(13) as pool:
        found = [pool.submit(client.generate, prompt, LONG) for prompt in asked[:6]]
        eventually(lambda: all(w["requests"] for w in client.health()["workers"]))
        draining: Future = pool.submit(client.drain_worker, "worker-0")
        eventually(lambda: any(w["draining"] for w in client.health()["workers"]))
        late = [client.generate(prompt, Sampling(max_tokens=4)).usage.worker for prompt in asked[6:]]
        assert set(late) == {"worker-1"}
        answers = [answer.result(60) for answer in found]
        assert [answer.token_ids for answer in answers] == [expected(prompt) for prompt in asked[:6]]
        assert {answer.usage.worker for answer in answers} == {"worker-0", "worker-1"}, "it finished its own"
        eventually(lambda: not stack._threads[0].is_alive())
        # A thread says no Leave.
        say_leave(stack._worker_configs[0].router, "worker-0", "stopped", os.getpid(), INCARNATION, planned=True)
        assert draining.result(30) == {"worker": "worker-0", "restart": False}
        assert [w["name"] for w in client.health()["workers"]] == ["worker-1"]


def test_what_http_says_of_a_server_that_is_about_to_end_or_does_not_get_on():
    with local(1) as stack:
        front = FrontendThread(resolve(FrontendConfig(tokenizer="none", router=stack.address, port=0)))
        try:
            core = stack._router_thread.server.core
            (member,) = core.workers
            with httpx.Client(base_url=front.url) as client:
                assert client.get("/health").json() == {"status": "ok", "workers": 1, "stalled_seconds": 0.0}
                member.stuck = True
                health = client.get("/health")
                assert health.status_code == 503 and health.json()["reason"] == "no worker makes progress"
                core.drains.server = True
                health = client.get("/health")
                assert health.status_code == 503 and health.json()["status"] == "draining"
                refused = client.post("/v1/completions", json={"prompt": [5], "max_tokens": 1})
                assert refused.status_code == 503 and int(refused.headers["retry-after"]) > 0
                assert "draining" in refused.json()["error"]["message"]
        finally:
            front.stop()


# ---------------------------------------------------------------- children that make no progress


def test_pulses_say_for_how_long_none_has_come():
    ours, theirs = os.pipe()
    pulses, pulse = Pulses(ours), Pulse(theirs)
    assert pulses.look(0.0) is None, "it may still be starting"
    pulse.beat(IDLE)
    assert pulses.look(1.0) == 0.0 and pulses.state == IDLE
    assert pulses.look(2.0) == 1.0
    assert pulses.look(2.0 + 50 * MAX_LOOK_SECONDS) == 1.0, "the parent did not run, and maybe nobody did"
    pulse.beat()
    assert pulses.look(200.0) == 0.0 and (pulses.state, pulses.count) == (BUSY, 2)
    pulses.close()
    pulse.beat()
    os.close(theirs)
    assert pulses.look(201.0) == 1.0


def test_a_stopped_child_is_killed():
    ours, theirs = os.pipe()
    code = f"import os, time\nwhile True: os.write({theirs}, b'.'); time.sleep(0.01)"
    process = subprocess.Popen([sys.executable, "-S", "-c", code], pass_fds=(theirs,))
    os.close(theirs)
    child = Child("frontend", "frontend-0", process, Pulses(ours))
    try:
        eventually(lambda: child.pulses.look(time.monotonic()) is not None)
        assert not child.end_if_silent(10.0, time.monotonic())
        process.send_signal(signal.SIGSTOP)
        eventually(lambda: child.end_if_silent(0.1, time.monotonic()))
        assert process.wait(10) == -signal.SIGKILL
    finally:
        process.kill()
        stop_subprocesses([child])


def test_what_ends_a_process():
    idle, drained = False, []
    ours, theirs = os.pipe()
    pulses = Pulses(ours)

    def look(ending: Ending) -> tuple[bool, bytes]:
        ends = ending.look()
        pulses.look(0.0)
        return ends, pulses.state

    def ending(seconds: float) -> Ending:
        return Ending(seconds, lambda: drained.append(1), lambda: idle, Pulse(theirs))

    one = ending(60.0)
    assert look(one) == (False, BUSY) and not drained
    one.asked()
    assert look(one) == (False, DRAINING) and look(one) == (False, DRAINING) and len(drained) == 1
    idle = True
    assert look(one) == (False, DRAINED), "its parent says when"
    one.told()
    assert look(one) == (True, DRAINED)
    idle = False
    other = ending(60.0)
    other.told()
    assert not other.look(), "it waits for what is in flight"
    other.told()
    assert other.look(), "told twice, it does not"
    at_once = ending(0.0)
    at_once.told()
    assert at_once.look()
    late = ending(0.001)
    late.told()
    eventually(late.look)
    pulses.close()
    os.close(theirs)


# ---------------------------------------------------------------- whole stacks


def serve(*flags: str) -> tuple[subprocess.Popen, str, str]:
    """`radixrt serve` with fake workers: the process, its ZMQ address and its URL."""
    address, inner, http = (free_tcp_address() for _ in range(3))
    command = [sys.executable, "-m", "radixrt", "serve", "nano", "--client-address", address]
    command += ["--worker-address", inner, "--port", http.rpartition(":")[2], *flags]
    return subprocess.Popen(command), address, http.replace("tcp", "http")


def is_up(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=60).status_code == 200
    except httpx.TransportError:
        return False


@contextlib.contextmanager
def served(*flags: str) -> Iterator[tuple[subprocess.Popen, str, str]]:
    process, address, url = serve(*flags)
    try:
        eventually(lambda: process.poll() is None and is_up(url))
        yield process, address, url
    finally:
        process.kill()
        process.wait()


def streamed(url: str, tokens: int) -> tuple[int, bool]:
    """(parts of the text, whether it came to its end) of a stream over HTTP."""
    body = {"model": "nano", "prompt": "Hi", "max_tokens": tokens, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
        lines = [line for line in response.iter_lines() if line.startswith("data: ")]
    return len(lines) - 1, lines[-1] == "data: [DONE]"


@pytest.mark.slow
@pytest.mark.parametrize("fronts", ["1", "2"])
def test_a_server_that_is_told_to_stop_finishes_its_requests(fronts):
    """Over HTTP and ZMQ; new ones are refused meanwhile, and it ends as soon as the last one is finished."""
    with served("--fake", "0,0.01", "--workers", "2", "--api-server-count", fronts) as (process, address, url):
        with Client(address) as client, ThreadPoolExecutor(3) as pool:
            over_http = pool.submit(streamed, url, 300)
            over_zmq = pool.submit(client.generate, [5, 6, 7], Sampling(max_tokens=300, ignore_eos=True))
            eventually(lambda: client.health()["runs_in_flight"] == 2)
            process.send_signal(signal.SIGTERM)
            eventually(lambda: httpx.get(f"{url}/health", timeout=60).status_code == 503)
            health = httpx.get(f"{url}/health", timeout=60)
            assert health.json()["status"] == "draining" and health.headers["retry-after"]
            refused = httpx.post(f"{url}/v1/completions", json={"model": "nano", "prompt": "x"}, timeout=60)
            assert refused.status_code == 503 and "draining" in refused.text and int(refused.headers["retry-after"]) > 0
            with pytest.raises(ServerError, match="draining") as caught:
                client.generate([5], Sampling(max_tokens=1))
            assert caught.value.code == 503 and caught.value.retry_after
            assert over_http.result(60) == (300, True)
            assert len(over_zmq.result(60).token_ids) == 300
            assert process.wait(20) == 0


@pytest.mark.slow
def test_told_twice_a_server_ends_at_once():
    with served("--fake", "0,0.01") as (process, address, _):
        with Client(address) as client, ThreadPoolExecutor(1) as pool:
            found = pool.submit(client.generate, [5, 6, 7], Sampling(max_tokens=100_000, ignore_eos=True))
            eventually(lambda: client.health()["runs_in_flight"] == 1)
            process.send_signal(signal.SIGINT)
            eventually(lambda: client.health()["draining"])
            assert process.poll() is None
            process.send_signal(signal.SIGINT)
            assert process.wait(20) == 0
            with pytest.raises(ServerError):
                found.result(20)


@pytest.mark.slow
def test_a_worker_that_hangs_is_started_again():
    """Though it is the only one, and nothing is known of its steps."""
    flags = "--fake", "100000,3600", "--watchdog-timeout", "2", "--shutdown-timeout", "0"
    with served(*flags) as (process, address, url):
        with Client(address) as client:
            before = client.health()["workers"][0]["pid"]
            with ThreadPoolExecutor(1) as pool:
                found = pool.submit(client.generate, [5, 6, 7], Sampling(max_tokens=1))
                eventually(lambda: httpx.get(f"{url}/health", timeout=60).json().get("stalled_seconds", 0) > 0)
                eventually(lambda: not client.health()["workers"])
                eventually(lambda: [w["pid"] for w in client.health()["workers"]] not in ([], [before]))
                process.send_signal(signal.SIGTERM)
                with pytest.raises(ServerError):
                    found.result(60)


@pytest.mark.slow
@pytest.mark.parametrize("role", ["frontend-0", "worker-0", "router"])
def test_a_process_that_is_stopped_is_replaced(monkeypatch, role):
    monkeypatch.setattr(launcher, "SILENT_SECONDS", dict.fromkeys(subprocesses.SILENT_SECONDS, 3.0))
    address, inner, http = (free_tcp_address() for _ in range(3))
    router = RouterConfig(model="nano", client_address=address, worker_address=inner, worker_timeout=2.0)
    frontend = FrontendConfig(model="nano", port=int(http.rpartition(":")[2]))
    worker = WorkerConfig(model="nano", fake="0,0.001")
    stack = launcher.Stack(StackConfig(resolve(router), worker, resolve(frontend), 2, 2, ready_timeout=60.0))
    codes: list[int] = []
    with stack:
        stack.start()
        watcher = threading.Thread(target=lambda: codes.append(stack.watch()))
        watcher.start()
        (victim,) = (child for child in stack._subprocesses if child.name == role)
        eventually(lambda: victim.pulses.count)
        os.kill(victim.process.pid, signal.SIGSTOP)
        if role == "router":
            watcher.join(60)
            assert codes == [1]
            return
        again = eventually(lambda: [c for c in stack._subprocesses if c.name == role and c is not victim])
        eventually(lambda: again[0].pulses.count)
        with Client(address) as client:
            eventually(lambda: len(client.health()["workers"]) == 2)
            assert client.generate([5, 6, 7], LONG).finish == "length"
        stack.request_stop()
        watcher.join(30)


@pytest.mark.slow
def test_a_rolling_restart_loses_nothing():
    """Each worker is drained and started again, while clients ask; all answers are as without."""
    sampling = Sampling(max_tokens=80, temperature=0.0, ignore_eos=True)
    with served("--fake", "0,0.005", "--workers", "2") as (_, address, _), Client(address) as client:
        eventually(lambda: len(client.health()["workers"]) == 2)
        first = {w["name"]: w["pid"] for w in client.health()["workers"]}
        asked = prompts(4)
        alone = [client.generate(prompt, sampling).token_ids for prompt in asked]
        over, wrong, counts = threading.Event(), [], [0] * len(asked)

        def load(n: int) -> None:
            while not over.is_set():
                if client.generate(asked[n], sampling).token_ids != alone[n]:
                    wrong.append(n)
                counts[n] += 1

        with ThreadPoolExecutor(len(asked)) as pool:
            loads = [pool.submit(load, n) for n in range(len(asked))]
            for name in first:
                command = [sys.executable, "-m", "radixrt", "drain", name, "--restart", "--url", address]
                done = subprocess.run(command, capture_output=True, text=True, timeout=120)
                assert done.returncode == 0 and done.stdout.endswith("serves again\n"), done.stderr
            over.set()
            for one in loads:
                one.result(60)
        assert not wrong and min(counts) > 0
        assert all(w["pid"] != first[w["name"]] for w in client.health()["workers"])
