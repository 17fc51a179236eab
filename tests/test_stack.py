"""The whole stack as processes, on a checkpoint made on the spot: what users start, and what must survive."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import httpx
import psutil
import pytest

from radixrt import wire
from radixrt.client import Client, ServerError
from radixrt.client.local import LocalStack
from radixrt.config import FrontendConfig, RouterConfig, StackConfig, WorkerConfig, resolve
from radixrt.launch import launcher
from radixrt.launch.launcher import Child, Stack, start_subprocess
from radixrt.messages import (
    Cancel,
    Generate,
    Heartbeat,
    Origin,
    Register,
    Sampling,
    TokenPrompt,
)
from radixrt.process import subprocesses
from radixrt.process.ports import free_tcp_address
from radixrt.process.shutdown import BUSY, DRAINED, DRAINING, IDLE, Pulses
from radixrt.process.starting import StartError
from tests.checkpoints import make_model, make_tokenizer
from tests.waiting import eventually
from tests.worker.engine import prompts

GREEDY = Sampling(max_tokens=64, temperature=0.0, ignore_eos=True)


def port_of(address: str) -> str:
    return address.rpartition(":")[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_model(path, "llama", num_hidden_layers=2)
    return make_tokenizer(path)


def config(folder: Path, workers: int, *, http: bool = False, **worker) -> StackConfig:
    settings = {"model": str(folder), "max_total_tokens": 8192, "max_model_len": 2048, "device": "cpu"} | worker
    router = RouterConfig(
        model=str(folder),
        client_address=free_tcp_address(),
        worker_address=free_tcp_address(),
        worker_timeout=2.0,
    )
    frontend = FrontendConfig(model=str(folder), port=int(port_of(free_tcp_address())))
    return StackConfig(
        resolve(router), WorkerConfig(**settings), resolve(frontend), workers, int(http), ready_timeout=60.0
    )


@contextmanager
def stack(folder: Path, workers: int, **settings):
    """A running Stack, watched as `radixrt serve` does."""
    with watched(Stack(config(folder, workers, **settings))) as running:
        yield running


@contextmanager
def watched(running: Stack):
    with running:
        running.start()
        watcher = threading.Thread(target=running.watch)
        watcher.start()
        try:
            yield running
        finally:
            running.request_stop()
            watcher.join(10)


def children_of(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


# ---------------------------------------------------------------- one process a role


@pytest.fixture(scope="module")
def pair(folder):
    """(address, Stack) of a router and two CPU workers."""
    with stack(folder, 2) as running:
        yield running._client_address, running


def test_generates_what_the_model_says(pair, folder):
    address, _ = pair
    asked = prompts(4, 10, 30)
    with LocalStack(config(folder, 1)) as local, Client(local.address) as inside, Client(address) as client:
        alone = [inside.generate(prompt, GREEDY).token_ids for prompt in asked]
        assert [client.generate(prompt, GREEDY).token_ids for prompt in asked] == alone
        streamed = [t for delta in client.stream(asked[0], GREEDY) for t in memoryview(delta.ids).cast("i")]
        assert streamed == alone[0]


def test_text_goes_in_and_comes_out(pair):
    with Client(pair[0]) as client:
        whole = client.generate("The quick brown fox", GREEDY)
        deltas = list(client.stream("The quick brown fox", GREEDY))
        assert "".join(delta.text for delta in deltas) == whole.text == client.detokenize(whole.token_ids)
        chat = client.generate([{"role": "user", "content": "hello"}], GREEDY)
        assert chat.usage.completion_tokens == 64


def test_a_second_turn_computes_only_what_is_new(folder):
    with LocalStack(config(folder, 1)) as local, Client(local.address) as client:
        first = prompts(1, 300, 300, seed=5)[0]
        answer = client.generate(first, GREEDY, origin=Origin("chat"))
        second = client.generate([*first, *answer.token_ids, 7, 8, 9], GREEDY, origin=Origin("chat"))
        assert second.usage.cached_tokens >= len(first) + len(answer.token_ids) - 1
        rows = [row for row in client.report()["programs"] if row["program"] == "chat"]
        assert rows[0]["hit_tokens"] == second.usage.cached_tokens


def test_what_a_worker_evicts_is_in_host_memory(folder):
    """Its pages hold two of eight prompts. The router knows where the others are."""
    settings = config(folder, 1, max_total_tokens=700, kv_offloading_size="0.02")
    with LocalStack(settings) as local, Client(local.address) as client:
        asked = prompts(8, 300, 300, seed=8)
        first = [client.generate(prompt, Sampling(max_tokens=2, temperature=0.0)) for prompt in asked]
        again = [client.generate(prompt, Sampling(max_tokens=2, temperature=0.0)) for prompt in asked]
        assert [answer.usage.cached_tokens for answer in again] == [299] * 8
        assert [(a.usage.worker, a.token_ids) for a in again] == [(a.usage.worker, a.token_ids) for a in first]
        workers = client.report()["workers"]
        assert sum(row["fetched_tokens"] for row in workers) > 1000 > sum(row["evicted_tokens"] for row in workers)
        total = client.report()["total"]
        assert total["hit_tokens"] == total["predicted_tokens"] == 8 * 299


def test_scores_and_samples(pair):
    with Client(pair[0]) as client:
        scored = client.score("The answer is", [" yes", " no", " perhaps not"])
        assert len(scored.logprobs) == 3 and all(x < 0 for choice in scored.logprobs for x in choice)
        sampling = Sampling(max_tokens=12, temperature=1.0, seed=7, top_p=0.9, top_k=50, logprobs=2, ignore_eos=True)
        three = client.generate_n("Once", 3, sampling)
        assert len({c.text for c in three}) == 3
        assert [c.ids for c in client.generate_n("Once", 3, sampling)] == [c.ids for c in three]
        assert all(len(c.logprobs) == 12 and len(c.logprobs[0].top) == 2 for c in three)


def test_a_stop_string_ends_the_text(pair):
    with Client(pair[0]) as client:
        whole = client.generate("Tell me", GREEDY).text
        stop = whole[20:23]
        cut = client.generate("Tell me", Sampling(max_tokens=64, temperature=0.0, ignore_eos=True, stop=(stop,)))
        assert cut.text == whole[: whole.index(stop)] and (cut.finish, cut.stop) == ("stop", stop)


def test_errors_name_the_field(pair):
    with Client(pair[0]) as client:
        for prompt, sampling, field, code in (
            ([], GREEDY, "prompt", 400),
            ("", GREEDY, "prompt", 400),
            ([5, -3], GREEDY, "prompt", 400),
            ([5, 99_999], GREEDY, "prompt", 400),
            ([5] * 3000, GREEDY, "prompt", 400),
            ("x", Sampling(max_tokens=-1), "max_tokens", 400),
            ("x", Sampling(temperature=-1.0), "temperature", 400),
            ("x", Sampling(top_p=-0.1), "top_p", 400),
        ):
            with pytest.raises(ServerError) as caught:
                client.generate(prompt, sampling)
            assert (caught.value.field, caught.value.code) == (field, code)
        with pytest.raises(ServerError) as caught:
            client.generate("x", GREEDY, model="gpt-9")
        assert (caught.value.field, caught.value.code) == ("model", 404)


def test_garbage_disturbs_nobody(pair):
    address, running = pair
    with Client(address) as client, wire.Link(address) as link, wire.Link(running._worker_address, b"evil") as evil:
        stream = client.stream(prompts(1, 20, 20, seed=3)[0], GREEDY)
        first = next(stream)
        nested = b"\x82\xa4type\xa8tokenize\xa6prompt" + b"\x91" * 100_000 + b"\xc0"
        unknown = wire.encode({"type": "dance", "id": 3})
        for payload in (b"", b"\xc1", b"\x00" * 5000, nested, unknown, wire.encode(Cancel(99))):
            link.send(payload)
            evil.send(payload)
        assert sum(len(delta.ids) for delta in (first, *stream)) == 4 * 64
        answers = [wire.Decoder(dict).decode(link.recv(30)) for _ in range(5)]
        assert all(answer["code"] == 400 for answer in answers)
        assert answers[-1]["id"] == 3


def test_leaving_a_stream_frees_its_pages(pair):
    with Client(pair[0]) as client:
        for delta in client.stream([9] * 50, Sampling(max_tokens=1500, ignore_eos=True)):
            if delta.ids:
                break

        def idle() -> bool:
            health = client.health()
            busy = [w for w in health["workers"] if w["free_pages"] + w["evictable_pages"] < w["total_pages"]]
            return not busy and not health["runs_in_flight"]

        eventually(idle)


# ---------------------------------------------------------------- things that die


def test_a_killed_worker_costs_nothing(folder):
    """kill -9 while requests stream: they finish on the other worker, token for token as without. (It is stopped
    before, so that it cannot finish them while the test looks which it has.)"""
    long = Sampling(max_tokens=400, temperature=0.0, ignore_eos=True)
    drawn = Sampling(max_tokens=400, temperature=1.0, seed=3, ignore_eos=True)
    asked = prompts(6, 20, 200, seed=8)
    with stack(folder, 2) as running, Client(running._client_address) as client:
        samplings = [long, drawn] * 3
        with LocalStack(config(folder, 1)) as local, Client(local.address) as inside:
            with ThreadPoolExecutor(len(asked)) as pool:
                expected = [found.token_ids for found in pool.map(inside.generate, asked, samplings)]
        results: list[list[int]] = [[] for _ in asked]
        workers: list[str] = ["" for _ in asked]

        def follow(i: int) -> None:
            for delta in client.stream(asked[i], samplings[i]):
                results[i].extend(memoryview(delta.ids).cast("i"))
                if delta.usage:
                    workers[i] = delta.usage.worker

        threads = [threading.Thread(target=follow, args=(i,)) for i in range(len(asked))]
        for thread in threads:
            thread.start()
        while max(map(len, results)) < 20:  # a worker that gets little of the processor may be far behind
            time.sleep(0.005)
        busiest = max(client.health()["workers"], key=lambda worker: worker["requests"])["name"]
        (victim,) = named(running, busiest)
        (other,) = {"worker-0", "worker-1"} - {busiest}
        os.kill(victim.process.pid, signal.SIGSTOP)
        lost = {w["name"]: w["requests"] for w in client.health()["workers"]}[busiest]
        assert lost > 0, "there is something to lose"
        os.kill(victim.process.pid, signal.SIGKILL)
        for thread in threads:
            thread.join(60)
        assert results == expected
        assert set(workers) == {other}
        health = client.health()
        assert other in [w["name"] for w in health["workers"]]
        assert health["counters"]["redispatched"] >= lost
        eventually(lambda: len(client.health()["workers"]) == 2, 60)
        assert client.generate(asked[0], long).token_ids == expected[0]


@pytest.mark.slow
def test_a_killed_rank_costs_nothing(folder):
    """kill -9 of a rank that follows: its worker ends, another one finishes its requests, and all ranks come back."""
    long = Sampling(max_tokens=300, temperature=0.0, ignore_eos=True)
    asked = prompts(4, 20, 200, seed=8)

    def followers() -> list[psutil.Process]:
        found = children_of(os.getpid())
        return [
            p for p in found if p.status() != psutil.STATUS_ZOMBIE and "radixrt.worker.parallel.follower" in p.cmdline()
        ]

    with stack(folder, 2, tensor_parallel_size=2) as running, Client(running._client_address) as client:
        assert len(followers()) == 2
        results: dict[int, list[int]] = {}
        threads = [
            threading.Thread(target=lambda i=i: results.update({i: client.generate(asked[i], long).token_ids}))
            for i in range(4)
        ]
        for thread in threads:
            thread.start()
        eventually(lambda: any(w["requests"] for w in client.health()["workers"]))
        (victim,) = named(running, max(client.health()["workers"], key=lambda worker: worker["requests"])["name"])
        (rank,) = psutil.Process(victim.process.pid).children()
        rank.kill()
        for thread in threads:
            thread.join(60)
        assert victim.process.wait(30) == 1
        assert results == {i: client.generate(asked[i], long).token_ids for i in range(4)}
        eventually(lambda: len(client.health()["workers"]) == 2 and len(followers()) == 2, 60)
    assert not followers()


def act(monkeypatch, ends: dict[str, str]) -> dict[str, list[float]]:
    """Children do by name what a shell is told instead. When each was begun."""
    begun: dict[str, list[float]] = {name: [] for name in ends}

    def start(role: str, name: str, *_settings: object, **_more: object) -> Child:
        begun[name].append(time.monotonic())
        return Child(role, name, subprocess.Popen(["sh", "-c", ends[name]], stdin=subprocess.PIPE))

    def start_router(running: Stack, http: object, deadline: float) -> None:
        running._subprocesses.append(start("router", "router"))

    monkeypatch.setattr(launcher, "start_subprocess", start)
    monkeypatch.setattr(Stack, "_start_router", start_router)
    monkeypatch.setattr(Stack, "_wait", lambda self, deadline: None)
    return begun


def test_a_worker_that_fails_again_and_again_is_started_less_often(folder, monkeypatch):
    """Each time after twice the time; one that was told to leave is not started again; when none is left, all end."""
    monkeypatch.setattr(launcher, "RESTART_SECONDS", 0.1)
    monkeypatch.setattr(launcher, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(launcher, "MAX_SECONDS", 0.4)
    ends = {"router": "exec sleep 60", "worker-0": "exit 3", "worker-1": "exec sleep 60", "worker-2": "exit 0"}
    begun = act(monkeypatch, ends)
    monkeypatch.setattr(launcher, "Incarnation", partial(launcher.Incarnation, delay=0.05))
    with Stack(config(folder, 3)) as running:
        running.start()
        codes: list[int] = []
        watcher = threading.Thread(target=lambda: codes.append(running.watch()))
        watcher.start()
        eventually(lambda: len(begun["worker-0"]) == 6)
        next(child for child in running._subprocesses if child.name == "worker-1").process.terminate()
        watcher.join(10)
    assert codes == [1]
    waits = [b - a for a, b in pairwise(begun["worker-0"])]
    assert all(wait >= least for wait, least in zip(waits, [0.1, 0.2, 0.4, 0.4, 0.4], strict=False))
    assert len(begun["worker-1"]) == len(begun["worker-2"]) == len(begun["router"]) == 1


def test_workers_that_end_together_are_not_expected_again(folder, monkeypatch, caplog):
    act(monkeypatch, {"router": "exec sleep 60", "worker-0": "exit 3", "worker-1": "exit 3"})
    with Stack(config(folder, 2)) as running:
        running.start()
        for child in running._subprocesses[1:]:
            child.process.wait(10)
        assert running.watch() == 1
    assert "no worker is left: stopping" in caplog.text and "started again" not in caplog.text


@pytest.mark.parametrize("code", [subprocesses.RESTART_CODE, subprocesses.HANG_CODE])
def test_a_worker_that_ends_in_order_to_be_replaced_is_started_again_though_it_is_the_last(folder, monkeypatch, code):
    """At once if it was told to; else as one that failed."""
    monkeypatch.setattr(launcher, "RESTART_SECONDS", 0.05)
    monkeypatch.setattr(launcher, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(launcher, "Incarnation", partial(launcher.Incarnation, delay=0.02))
    begun = act(monkeypatch, {"router": "exec sleep 60", "worker-0": f"exit {code}"})
    with watched(Stack(config(folder, 1))) as running:
        eventually(lambda: len(begun["worker-0"]) == 3)
        assert named(running, "router")[0].alive


def test_a_child_that_does_not_get_on_is_replaced(folder, monkeypatch, caplog):
    """A worker by another process; without its router the stack ends, and says so by its code."""
    monkeypatch.setattr(launcher, "RESTART_SECONDS", 0.05)
    monkeypatch.setattr(launcher, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(launcher, "Incarnation", partial(launcher.Incarnation, delay=0.02))
    begun = act(monkeypatch, {"router": "exec sleep 60", "worker-0": "exec sleep 60"})
    silent = {"worker-0": 0}
    look = Child.end_if_silent

    def end_if_silent(child: Child, seconds: float, now: float) -> bool:
        assert seconds == subprocesses.SILENT_SECONDS[child.role]
        if silent.get(child.name) != child.process.pid:
            return look(child, seconds, now)
        child.process.kill()
        return True

    monkeypatch.setattr(Child, "end_if_silent", end_if_silent)
    with Stack(config(folder, 1)) as running:
        running.start()
        codes: list[int] = []
        watcher = threading.Thread(target=lambda: codes.append(running.watch()))
        watcher.start()
        silent["worker-0"] = named(running, "worker-0")[0].process.pid
        eventually(lambda: len(begun["worker-0"]) == 2)
        silent["router"] = named(running, "router")[0].process.pid
        watcher.join(30)
    assert codes == [1] and "no router is left: stopping" in caplog.text


def test_a_stack_drains_until_router_and_front_ends_say_so(folder, monkeypatch):
    monkeypatch.setattr(launcher, "POLL_SECONDS", 0.01)
    running = Stack(dataclasses.replace(config(folder, 1), api_server_count=2))
    sent: list[int] = []
    process = SimpleNamespace(poll=lambda: None, send_signal=sent.append, stdin=None)
    pipes = [os.pipe() for _ in range(3)]
    names = ["router", "frontend-0", "frontend-1"]
    kids = [Child(n.partition("-")[0], n, process, Pulses(p[0])) for n, p in zip(names, pipes, strict=True)]
    running._subprocesses = list(kids)
    drained = threading.Event()
    waiter = threading.Thread(target=lambda: (running.drain(), drained.set()))
    waiter.start()

    def say(number: int, state: bytes) -> None:
        """So often that it was said after all that was said before."""
        for _ in range(3):
            os.write(pipes[number][1], state)
            time.sleep(0.02)

    early = (1, IDLE), (2, IDLE), (0, DRAINING), (1, IDLE), (2, BUSY)
    for number, state in (*early, (0, DRAINED), (1, IDLE), (2, BUSY)):
        say(number, state)
        assert not drained.is_set(), "an answer is on its way"
    say(2, IDLE)
    assert drained.wait(30) and sent == [signal.SIGUSR1]
    running.request_stop()
    running.request_stop()
    os.write(pipes[0][1], DRAINING)
    time.sleep(0.02)
    running.drain()  # told twice, it does not wait
    running._subprocesses = []
    for child, (_, theirs) in zip(kids, pipes, strict=True):
        child.pulses.close()
        os.close(theirs)


def test_a_front_end_that_fails_is_started_again(folder, monkeypatch):
    monkeypatch.setattr(launcher, "Incarnation", partial(launcher.Incarnation, delay=0.05))
    several = dataclasses.replace(config(folder, 1, fake="0,0.001"), api_server_count=2)
    with watched(Stack(several)) as running:
        (victim,) = (child for child in running._subprocesses if child.name == "frontend-0")
        os.kill(victim.process.pid, signal.SIGKILL)
        eventually(lambda: len(again := named(running, "frontend-0")) == 1 and again[0] is not victim)
        (other,) = named(running, "frontend-1")
        other.process.kill()
        health = f"http://127.0.0.1:{several.frontend.port}/health"
        eventually(lambda: answers(health))


def named(running: Stack, name: str) -> list[Child]:
    return [child for child in running._subprocesses if child.name == name]


def answers(url: str) -> bool:
    try:
        return httpx.get(url).status_code == 200
    except httpx.TransportError:
        return False


def test_a_second_stack_disturbs_no_first(folder, caplog, capfd):
    """It fails by itself, and none of its processes speaks to the first one's router, or answers for its front end."""
    first = config(folder, 1, http=True, fake="0,0.001")
    other = config(folder, 1, http=True, fake="0,0.001")
    shares = dataclasses.replace(other, frontend=first.frontend, api_server_count=2)
    with stack_of(first) as running, Client(running._client_address) as client:
        before = client.health()["workers"][0]["pid"]
        for second in (
            dataclasses.replace(first, frontend=other.frontend),
            dataclasses.replace(other, frontend=first.frontend),
        ):
            with pytest.raises(StartError, match="router ended with code 2"), stack_of(second):
                pass
        with pytest.raises(OSError, match="Address already in use"), stack_of(shares):
            pass
        assert [w["pid"] for w in client.health()["workers"]] == [before]
        assert all(child.alive for child in running._subprocesses)
    assert capfd.readouterr().err.count("Address already in use") == 2
    assert caplog.text.count("worker-0") == 0


def test_a_stack_on_free_ports_says_which(folder, caplog):
    caplog.set_level("INFO")
    settings = config(folder, 1, http=True, fake="0,0.001")
    frontend = dataclasses.replace(settings.frontend, port=0, host="::1")
    with stack_of(dataclasses.replace(settings, frontend=frontend)) as running:
        assert f"HTTP http://[::1]:{running._port}," in caplog.text
        assert answers(f"http://[::1]:{running._port}/health")


def test_a_worker_that_lasted_is_started_again_soon(folder):
    started: list[str] = []
    incarnation = launcher.Incarnation("worker-0", lambda: started.append("worker-0"), began=100.0)
    running, child = Stack(config(folder, 2)), Child("worker", "worker-0", SimpleNamespace(returncode=3))
    running._incarnations["worker-0"] = incarnation
    waits = []
    for ended in (101.0, 102.0, 103.0, 103.0 + 2 * launcher.STEADY_SECONDS):
        running._expect(child, ended)
        waits.append(incarnation.due - ended)
        incarnation.began = ended
    assert waits == [1.0, 2.0, 4.0, 1.0]
    incarnation.began = 5000.0
    for _ in range(9):
        running._expect(child, 5000.0)
    assert incarnation.due == 5000.0 + launcher.MAX_SECONDS
    for now in (5001.0, 5100.0, 5200.0):
        running._revive(now)
    assert started == ["worker-0"]


def test_a_worker_may_join_and_leave(pair, folder):
    address, running = pair
    with Client(address) as client:
        before = client.generate([5, 6, 7], GREEDY).token_ids
        extra = [sys.executable, "-m", "radixrt", "worker", "--model", str(folder), "--router", running._worker_address]
        process = subprocess.Popen([*extra, "--name", "guest", "--max-total-tokens", "4096", "--device", "cpu"])
        try:
            eventually(lambda: len(client.health()["workers"]) == 3)
            process.terminate()
            assert process.wait(10) == 0
            eventually(lambda: len(client.health()["workers"]) == 2)
            assert client.generate([5, 6, 7], GREEDY).token_ids == before
        finally:
            process.kill()
            process.wait()


def test_of_two_workers_of_one_name_the_first_serves(pair, folder):
    """The other one ends with an error that says why; once the first is gone, it may come, be it killed or not."""
    address, running = pair
    command = [sys.executable, "-m", "radixrt", "worker", "--model", str(folder), "--router", running._worker_address]
    command += ["--name", "twin", "--fake", "0,0.001"]
    processes = []
    try:
        with Client(address) as client:

            def serves(pid: int) -> bool:
                return pid in [w["pid"] for w in client.health()["workers"]]

            for _ in range(2):
                processes.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
                if len(processes) == 1:
                    eventually(lambda: serves(processes[0].pid))
            _, said = processes[1].communicate(timeout=20)
            assert processes[1].returncode == 1
            assert "twin ends: another worker serves under this name" in said and "Traceback" not in said
            assert serves(processes[0].pid)
            processes[0].kill()
            processes.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
            eventually(lambda: serves(processes[2].pid))
    finally:
        for process in processes:
            process.terminate()
            process.communicate()


@pytest.mark.slow
def test_a_worker_that_is_dismissed_while_it_should_serve_is_started_again(folder):
    with stack(folder, 2) as running, Client(running._client_address) as client:
        child = next(child for child in running._subprocesses if child.name == "worker-0")
        child.process.send_signal(signal.SIGSTOP)  # lost, so its name is free
        eventually(lambda: len(client.health()["workers"]) == 1)
        with wire.Link(running._worker_address) as link:
            about = {"model": folder.name, "max_model_len": 64, "page_size": 1, "total_pages": 64, "max_running": 1}
            link.send(wire.encode(Register(name="worker-0", pid=1, **about)))
            eventually(lambda: 1 in [w["pid"] for w in client.health()["workers"]])
            child.process.send_signal(signal.SIGCONT)
            while child.alive:
                link.send(wire.encode(Heartbeat("worker-0", 1)))
                time.sleep(0.1)
            assert child.process.returncode == 1
        eventually(lambda: len([w for w in client.health()["workers"] if w["pid"] != 1]) == 2)
        assert child not in running._subprocesses


def test_a_killed_router_comes_back_to_workers_that_kept_their_pages(folder):
    """kill -9: the worker joins the next router by itself, without its requests and with what is cached."""
    prompt = prompts(1, 200, 200, seed=3)[0]
    with stack_of(config(folder, 1)) as running:
        with Client(running._client_address) as client:
            before = client.generate(prompt, GREEDY).token_ids
            lasting = Sampling(max_tokens=1500, temperature=0.0, ignore_eos=True)
            next(client.stream(prompt[:50], lasting))
            running._subprocesses[0].process.kill()
            running._subprocesses[0].process.communicate()
        running._subprocesses[0] = start_subprocess("router", "router", running._config.router)
        with Client(running._client_address) as client:
            eventually(lambda: len(client.health()["workers"]) == 1)
            eventually(lambda: client.health()["workers"][0]["running"] == 0)
            after = client.generate(prompt, GREEDY)
            assert after.token_ids == before
            assert after.usage.cached_tokens == len(prompt) - 1
            assert client.health()["counters"]["snapshots"] >= 1, "the index learned what is cached"


@contextmanager
def stack_of(settings: StackConfig):
    running = Stack(settings)
    with running:
        running.start()
        yield running


def serve(folder: Path, *flags: str) -> tuple[subprocess.Popen, str]:
    """`radixrt serve` with fake workers; the process and the clients' address."""
    address, http = free_tcp_address(), free_tcp_address()
    command = [sys.executable, "-m", "radixrt", "serve", str(folder), "--fake", "0,0.001", "--workers", "2"]
    command += ["--client-address", address, "--port", port_of(http), *flags]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True), address


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_process_stays_behind(folder, how):
    process, address = serve(folder, "--api-server-count", "0")
    try:
        with Client(address, timeout=30) as client:
            eventually(lambda: len(client.health()["workers"]) == 2)
            family = children_of(process.pid)
            assert len(family) == 3
            ports = [c.laddr.port for one in family for c in one.net_connections("tcp") if c.status == "LISTEN"]
            assert ports == [int(port_of(address))], "none for workers"
            process.send_signal(how)
            assert process.wait(15) == (0 if how != signal.SIGKILL else -signal.SIGKILL)
        _, alive = psutil.wait_procs(family, timeout=15)
        assert not alive
        said = process.stderr.read()
        assert "worker-1 serves" in said and "Traceback" not in said and "Fatal" not in said
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def test_a_model_that_cannot_be_loaded_is_named(tmp_path):
    process = subprocess.run(
        [sys.executable, "-m", "radixrt", "serve", str(tmp_path), "--port", port_of(free_tcp_address())],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert process.returncode != 0 and str(tmp_path) in process.stderr


def test_a_stack_whose_worker_cannot_start_says_so(folder):
    with pytest.raises(StartError, match="worker-0 ended with code"):
        with stack_of(config(folder, 1, max_model_len=1 << 20)):
            pass


# ---------------------------------------------------------------- no worker, too much work


def test_no_worker_is_503():
    from radixrt.router.server.process import RouterThread

    router = RouterThread(RouterConfig(tokenizer="none", client_address="inproc://lonely", worker_address="inproc://w"))
    try:
        with Client("inproc://lonely") as client, pytest.raises(ServerError) as caught:
            client.generate([1, 2, 3], GREEDY)
        assert caught.value.code == 503 and caught.value.retry_after
    finally:
        router.stop()


def test_more_work_than_pages(folder):
    """Requests wait or are preempted; all finish, with the tokens they have alone. The pool is checked every step."""
    asked = prompts(16, 40, 120, seed=2)
    sampling = Sampling(max_tokens=60, temperature=0.0, ignore_eos=True)
    with LocalStack(config(folder, 1)) as local, Client(local.address) as client:
        expected = [client.generate(prompt, sampling).token_ids for prompt in asked]
    with LocalStack(config(folder, 1, max_total_tokens=400, check=True)) as local, Client(local.address) as client:
        results: list[list[int]] = [[] for _ in asked]

        def ask(i: int) -> None:
            results[i] = client.generate(asked[i], sampling).token_ids

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(asked))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert results == expected
        assert client.health()["workers"][0]["total_pages"] == 400


def test_too_many_requests_is_429(folder):
    settings = config(folder, 1, fake="0,0.01")
    router = RouterConfig(model=str(folder), max_queued_requests=2)
    with LocalStack(StackConfig(resolve(router), settings.worker, settings.frontend)) as local:
        with wire.Link(local.address) as link:
            for i in range(4):
                link.send(wire.encode(Generate(id=i, prompt=TokenPrompt(b"\5\0\0\0"), sampling=GREEDY, stream=False)))
            answers = [wire.Decoder(dict).decode(link.recv(5)) for _ in range(3)]
        refused = [a for a in answers if a["type"] == "error"]
        assert [(a["code"], a["id"]) for a in refused] == [(429, 2), (429, 3)]
        assert all(a["retry_after"] > 0 for a in refused)
