"""A worker of several ranks: what followers are told, what they do of it, and what happens when one ends."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from dataclasses import fields, is_dataclass, replace
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from torch import distributed

from radixrt.config import WorkerConfig, resolve
from radixrt.messages import Sampling
from radixrt.messages.ranks import Bind, PutAdapter, RequestInfo
from radixrt.worker.load.runner import load_runner, rank_device
from radixrt.worker.model.parallel.sharding import Shard
from radixrt.worker.parallel import tensor_parallel
from radixrt.worker.parallel.group import TorchGroup
from radixrt.worker.parallel.tensor_parallel import GroupLost, Leader, PlanDecoder, PlanEncoder
from radixrt.worker.plan import Draft, Moves, Plan, SampleInputs, StateWork
from tests.checkpoints import make_model
from tests.waiting import eventually
from tests.worker.engine import Engine, prompts


def request(number: int, **sampling) -> RequestInfo:
    return RequestInfo(id=number, number=number, prompt_len=2, limit=9, sampling=Sampling(**sampling))


def plan_of(requests: tuple[RequestInfo, ...], step: int = 7) -> Plan:
    count = len(requests)
    numbers = np.arange(count, dtype=np.int32)
    writes = np.array([[1, 2], [3, 4], [5, 6]], dtype=np.int32)
    return Plan(step, requests, numbers, numbers + 1, numbers + 2, numbers + 3, numbers + 4, numbers + 5,
                numbers % 2 == 0, writes)  # fmt: skip


def told(*plans: Plan) -> list[Plan]:
    """What arrives."""
    encoder, decoder = PlanEncoder(), PlanDecoder()
    return [decoder.unpack(tensor_parallel._decode(tensor_parallel._encode(encoder.pack(plan)))) for plan in plans]


def same(a: object, b: object) -> bool:
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.flags.writeable and np.array_equal(a, b)
    if is_dataclass(a):
        return type(a) is type(b) and all(same(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))
    return a == b


# ---------------------------------------------------------------- what is told


def test_a_plan_arrives_as_it_was():
    one, pair = np.array([5], np.int32), np.array([[1, 2], [3, 4]], np.int32)
    plain = plan_of(tuple(map(request, range(3))))
    full = replace(
        plain,
        requests=(request(1), request(4, temperature=0.5, logit_bias={3: 1.0}, stop=("a",)), request(2)),
        paths=(((1, 20), (-(5 << 32) - 9, 29)), (), ((1, 20),)),
        drafts=(Draft([7, 8], 1),),
        states=StateWork(one, pair, pair[:, :0], np.array([[5], [2], [6]], np.int32), one),
        adapters=np.array([-1, 3, 3], np.int32),
        moves=Moves(pair, pair[:, :0], pair[:, :1], pair[:, 1:]),
        following={1: [5, 6]},
        needs_host_tokens=True,
    )
    for plan, arrived in zip((plain, full, plain), told(plain, full, plain), strict=True):
        assert same(arrived, plan)


def test_requests_and_paths_are_told_once():
    """And again by who comes back."""
    encoder, a, b = PlanEncoder(), request(1), request(2)
    plan = replace(plan_of((a, b)), paths=(((1, 5),), ()))
    assert encoder.pack(plan).requests == [a, b]
    again = encoder.pack(replace(plan, step=8))
    assert again.requests is None and again.paths is None
    assert encoder.pack(plan_of((b, request(3)))).requests == [2, request(3)]
    assert encoder.pack(plan_of((a,))).requests == [a]


def test_ranks_have_devices_side_by_side():
    found = [rank_device(device, 3) for device in ("cpu", "cuda", "cuda:4")]
    assert found == ["cpu", "cuda:3", "cuda:7"]


@pytest.mark.parametrize("when", ["before", "launch", "wait", "draw"])
def test_what_fails_on_rank_0_alone_ends_the_worker(monkeypatch, when):
    """Unless nobody else has been told, or nobody else takes part."""
    left: list[str] = []
    monkeypatch.setattr(tensor_parallel, "leave", lambda: left.append("the group"))

    class Failing:
        planned = None

        def launch(self, plan):
            if when != "before":
                self.on_planned(plan)
            if when in ("before", "launch"):
                raise KeyError

            def wait():
                raise KeyError

            return wait

        def sample_deferred(self, inputs):
            raise KeyError

        def close(self):
            left.append("graphs")

    leader = Leader(
        Failing(), SimpleNamespace(send=lambda message: None, dismiss=lambda: None, close=lambda: left.append("ranks"))
    )
    with pytest.raises(GroupLost if when in ("launch", "wait") else KeyError):
        wait = leader.launch(plan_of((request(1),)))
        if when == "wait":
            wait()
        leader.sample_deferred(SampleInputs())
    leader.close()
    together = ["graphs", "the group"] if when in ("before", "draw") else []
    assert left == [*together, "ranks"], "who is alone does not wait for others"


def test_a_follower_waits_for_the_step_before():
    """No more than two steps are under way: what they are sent by is used in turn."""
    under_way: list[int] = []
    most: list[int] = []

    class Slow:
        overlaps = True

        def bind(self, table):
            assert table.shape == (4, 9)

        def launch(self, plan):
            under_way.append(plan.step)
            most.append(len(under_way))
            return lambda: under_way.remove(plan.step)

    theirs, mine = Pipe(duplex=False)
    mine.send_bytes(tensor_parallel._encode(Bind(4, 9)))
    encoder = PlanEncoder()
    for step in range(5):
        mine.send_bytes(tensor_parallel._encode(encoder.pack(plan_of((request(1),), step))))
    mine.close()
    with pytest.raises(EOFError):
        tensor_parallel.follow(Slow(), theirs)
    assert max(most) == 2 and under_way == [4]


def test_a_follower_writes_adapters_between_steps():
    """A step that is under way may read the slot."""
    done: list[str] = []

    class Notes:
        overlaps = True

        def bind(self, table):
            """The steps do not use it."""

        def launch(self, plan):
            return lambda: done.append(f"step {plan.step}")

        def read_adapter(self, module):
            return module.path

        def put_adapter(self, slot, module, adapter):
            done.append(f"{adapter} in {slot}")

    theirs, mine = Pipe(duplex=False)
    encoder = PlanEncoder()
    steps = [encoder.pack(plan_of((request(1),), step)) for step in range(3)]
    for message in (Bind(4, 9), steps[0], PutAdapter(3, "sql", "/a"), *steps[1:]):
        mine.send_bytes(tensor_parallel._encode(message))
    mine.close()
    with pytest.raises(EOFError):
        tensor_parallel.follow(Notes(), theirs)
    assert done == ["step 0", "/a in 3", "step 1"]


# ---------------------------------------------------------------- processes


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    make_model(folder, "llama")
    return folder


def load(folder, size: int, **settings):
    config = {"model": str(folder), "device": "cpu", "max_total_tokens": 2048, "tensor_parallel_size": size}
    return load_runner(resolve(WorkerConfig(**config | settings)))


@pytest.mark.parametrize(
    ("size", "settings"), [(2, {}), pytest.param(4, {"kv_cache_dtype": "fp8_e4m3"}, marks=pytest.mark.slow)]
)
def test_ranks_generate_what_one_does(folder, size, settings):
    """Four ranks share two KV heads. Chunks, prefixes, preemption, and what draws by more than logits; FP8 pages are
    exact, so warm is cold."""
    asked = prompts(10, 20, 200)
    greedy = Sampling(max_tokens=30, temperature=0.0, ignore_eos=True)
    drawn = Sampling(max_tokens=12, temperature=1.0, seed=3, repetition_penalty=1.2, logprobs=1, ignore_eos=True)
    found = []
    for ranks_of in (1, size):
        runner = load(folder, ranks_of, max_total_tokens=700, **settings)
        try:
            engine = Engine(runner, chunk=64, rows=16)
            cold = engine.generate(asked, greedy)
            assert engine.scheduler.preemptions
            assert engine.generate(asked[:3], greedy) == cold[:3]
            found.append([cold, engine.generate(asked[:4], drawn)])
            scores = []
            for _ in range(2):
                ids = [engine.add(p, Sampling(max_tokens=0), score_from=len(p) // 2) for p in asked[:3]]
                engine.finish()
                scores.append([s for id in ids for output in engine.outputs[id] for s in output.scores])
            if settings:
                assert scores[0] == scores[1], "to the last bit"
        finally:
            runner.close()
            runner.close()
        assert ranks_of == 1 or not runner._followers.folder.exists()
        running = [p for p in psutil.Process().children() if p.status() != psutil.STATUS_ZOMBIE]
        assert not any("radixrt.worker.parallel.follower" in p.cmdline() for p in running)
    assert found[0][0] == found[1][0]
    assert found[0][1] == found[1][1]


def test_one_group_a_process_at_a_time(folder, tmp_path):
    """A load that failed leaves none behind."""
    lacking = shutil.copytree(folder, tmp_path / "lacking", ignore=shutil.ignore_patterns("*.safetensors"))
    with pytest.raises(ValueError, match="holds no safetensors"):
        load(lacking, 2)
    runner = load(folder, 2)
    try:
        with pytest.raises(ValueError, match="tensor_parallel_size: this process has a group"):
            load(folder, 2)
    finally:
        runner.close()


def test_no_more_ranks_than_heads(folder):
    with pytest.raises(ValueError, match="num_attention_heads, 4"):
        load(folder, 3)
    with pytest.raises(ValueError, match="expected a number from 1"):
        load(folder, 0)


PROGRAM = """
import sys
from tests.worker.test_ranks import Engine, load, prompts
runner = load(sys.argv[1], 2)
engine = Engine(runner)
print(runner._followers.folder, flush=True)
while True:
    engine.generate(prompts(2, 20, 40))
"""


@pytest.mark.parametrize("who", ["the first", "the other"])
def test_ranks_end_together(folder, who):
    """kill -9 of one of them."""
    command = [sys.executable, "-c", PROGRAM, str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        meeting_place = Path(process.stdout.readline().strip())
        assert meeting_place.is_dir()
        (other,) = psutil.Process(process.pid).children()
        os.kill(process.pid if who == "the first" else other.pid, signal.SIGKILL)
        _, said = process.communicate(timeout=40)
        if who == "the other":
            assert process.returncode == 1
            assert "GroupLost" in said or "rank 1 ended with code -9" in said
        eventually(lambda: not other.is_running() or other.status() == psutil.STATUS_ZOMBIE)
        assert not meeting_place.exists()
    finally:
        process.kill()
        process.wait()


def test_a_rank_that_does_not_come_is_named(folder):
    """Nobody waits for it."""
    code = """
import subprocess, sys
from radixrt.worker.parallel import tensor_parallel
from tests.worker.test_ranks import load
gone = [sys.executable, "-c", "raise SystemExit(3)"]
tensor_parallel._start = lambda config: subprocess.Popen(gone, stdin=subprocess.PIPE)
tensor_parallel.FAIL_SECONDS = 0.5
load(sys.argv[1], 2)
"""
    command = [sys.executable, "-c", code, str(folder)]
    process = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert process.returncode == 1 and "rank 1 ended with code 3" in process.stderr


@pytest.mark.parametrize("shape", [(6, 1), (1, 5), (6, 5)])
def test_what_is_gathered_is_read_row_by_row(shape):
    group = TorchGroup(Shard(0, 3), torch.device("cpu"), exact=False)
    parts = torch.arange(3 * shape[0] * shape[1]).view(3, *shape)
    group._stacked = lambda x: parts
    found = group.gather(parts[0])
    assert found.is_contiguous() and torch.equal(found, torch.cat(list(parts), 1))


def test_exact_sums_do_not_depend_on_how_many_there_are():
    """Row by row, in the order of ranks, then the residual; by gloo with one rank, whose sum is itself."""
    group = TorchGroup(Shard(0, 3), torch.device("cpu"), exact=True)
    parts = [torch.randn(5, 64).bfloat16() for _ in range(3)]
    residual = torch.randn(5, 64).bfloat16()
    expected = (residual.float() + (parts[0].float() + parts[1].float() + parts[2].float())).bfloat16()
    for rows in (1, 5):
        for begin in range(0, 5, rows):
            cut = slice(begin, begin + rows)
            group._stacked = lambda mine, cut=cut: torch.stack([part[cut] for part in parts])
            some = residual[cut].clone()
            group._sum(parts[0][cut], some)
            assert torch.equal(some, expected[cut])
    assert not distributed.is_initialized()
