"""Pages and recurrent states that go to host memory and come back, with models; how much memory they get."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from radixrt.config import WorkerConfig, check, resolve
from radixrt.messages import Sampling
from radixrt.worker.execution.host_pool import HostPool, host_bytes
from radixrt.worker.execution.kv_pool import KVPool, StatePool
from radixrt.worker.execution.memory import available_bytes
from radixrt.worker.load import pools
from radixrt.worker.load.runner import load_runner
from radixrt.worker.model.parallel.sharding import Shard
from radixrt.worker.model.spec.mamba_spec import MambaSpec
from radixrt.worker.plan import Moves
from radixrt.worker.scheduler import state_checkpoints
from tests.worker.engine import Engine, prompts


def load(folder, **settings):
    config = {"model": str(folder), "device": "cpu", "dtype": "float32", "kv_offloading_size": "0.05"} | settings
    return load_runner(resolve(WorkerConfig(**config)))


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {}),
        ("llama", {"page_size": 16}),
        ("llama", {"kv_cache_dtype": "fp8_e4m3"}),
        pytest.param("llama", {"tensor_parallel_size": 2}, marks=pytest.mark.slow),
        ("gemma4_text", {"page_size": 4}),
        ("deepseek_v32", {}),
    ],
)
def test_what_comes_back_is_what_was_computed(checkpoint, family, settings):
    """The pool holds two of six prompts; in the second round nothing is computed but last tokens."""
    folder, _ = checkpoint(family)
    asked, few = prompts(6, 50, 60), Sampling(max_tokens=16, temperature=0.0, ignore_eos=True)
    runner = load(folder, max_total_tokens=160, **settings)
    try:
        engine = Engine(runner, chunk=24, rows=2)
        cold = engine.generate(asked, few)
        ids = [engine.add(prompt, few) for prompt in asked]
        engine.finish()
        assert [engine.tokens(id) for id in ids] == cold
        size = runner.page_size
        least = [len(prompt) - 1 - (len(prompt) - 1) % size for prompt in asked]
        assert [engine.last(id).cached_tokens for id in ids] == least
        assert engine.cache.tier.onloaded_pages > 0 and engine.cache.evicted_tokens == 0
    finally:
        runner.close()


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("qwen3_next", {"page_size": 16}),
        ("qwen3_next", {"tensor_parallel_size": 2}),
        ("kimi_linear", {}),
        ("lfm2", {}),
        ("nemotron_h", {"dtype": "bfloat16", "deterministic": True}),
        pytest.param("granitemoehybrid", {"kv_cache_dtype": "fp8_e4m3"}, marks=pytest.mark.slow),
        pytest.param("falcon_h1", {}, marks=pytest.mark.slow),
    ],
)
def test_recurrent_states_come_back_as_they_were(checkpoint, family, settings):
    """The pools hold one of six prompts, and the states of three: in the second round nothing is computed but the ends
    of prompts."""
    runner = load(checkpoint(family)[0], max_total_tokens=240, max_mamba_cache_size=3, **settings)
    try:
        engine, asked, few = (
            Engine(runner, chunk=64, rows=2),
            prompts(6, 100, 120),
            Sampling(max_tokens=8, temperature=0.0),
        )
        cold = engine.generate(asked, few)
        ids = [engine.add(prompt, few) for prompt in asked]
        engine.finish()
        assert [engine.tokens(id) for id in ids] == cold
        marks = [len(prompt) - state_checkpoints.TAIL for prompt in asked]
        assert [engine.last(id).cached_tokens for id in ids] == [mark - mark % runner.page_size for mark in marks]
        host = engine.cache.tier
        assert host.onloaded_pages > 0 and host.states.onloaded > 0 and engine.cache.evicted_tokens == 0
    finally:
        runner.close()


def test_without_host_memory_conversations_are_computed_again(checkpoint):
    """Three of them in turn, of which the device holds one; the answers are the same."""
    folder, _ = checkpoint("qwen3_next")
    answers, cached = {}, {}
    for size in ("0.05", "none"):
        engine = Engine(load(folder, max_total_tokens=300, max_mamba_cache_size=3, kv_offloading_size=size), rows=2)
        histories, answers[size], cached[size] = prompts(3, 100, 110), [], 0
        for turn in range(3):
            for history in histories:
                id = engine.add(history, Sampling(max_tokens=8, temperature=0.0, ignore_eos=True))
                engine.finish()
                answers[size].append(engine.tokens(id))
                cached[size] += engine.last(id).cached_tokens
                history += [*engine.tokens(id), *range(20 + turn, 30)]
    assert answers["0.05"] == answers["none"]
    assert cached == {"0.05": sum(len(history) for history in prompts(3, 100, 110)) * 2 + 3 * (7 + 7 + 18), "none": 0}


def test_host_memory_is_divided_between_states_and_pages(checkpoint):
    folder, _ = checkpoint("qwen3_next")
    assert load(folder, max_total_tokens=480, kv_offloading_size="auto").num_host_states == 0
    size, settings = int(0.01 * (1 << 30)), {"max_total_tokens": 480, "max_mamba_cache_size": 3}
    runner = load(folder, kv_offloading_size="0.01", **settings)
    state, page = runner.states.nbytes // 4, runner.pool.nbytes // runner.num_pages
    assert runner.num_host_states == 1 + size // 2 // state
    assert runner.num_host_pages == (size - (runner.num_host_states - 1) * state) // page
    assert runner.host.nbytes == (runner.num_host_states - 1) * state + runner.num_host_pages * page <= size
    few = load(folder, kv_offloading_size="0.01", max_num_seqs=2, **settings)
    assert few.num_host_states == 1 + 2 * pools.STATES and few.num_host_pages == (size - 16 * state) // page
    with pytest.raises(ValueError, match="kv_offloading_size: .* do not hold two pages and a recurrent state"):
        load(folder, kv_offloading_size=f"{1.9 * state / (1 << 30):.9f}", **settings)


def test_states_and_pages_are_moved_in_order():
    """What leaves does so before its place is filled, and what left in the same step can come back."""
    pool = KVPool(1, 4, 1, 8, torch.float32, torch.device("cpu"))
    spec = MambaSpec(frozenset({0, 1}), 2, 4, 1, 6, 4, conv_bias=False, bias=False, out_bias=False)
    states = StatePool(spec, 5, torch.bfloat16, torch.device("cpu"))
    for n in range(5):
        states.convs[n], states.rules[n] = n, 10 * n
    host = HostPool(pool, 1, torch.zeros(1 << 20, dtype=torch.uint8), None, states, 3)
    assert host.num_states == 4
    copies = (np.array(x, np.int32).reshape(2, -1) for x in ([], [], [[1, 3], [2, 1]], [[2, 1], [3, 1]]))
    host.move(Moves(*copies))
    assert [states.convs[n].unique().tolist() for n in range(5)] == [[0], [3], [2], [1], [4]]
    assert [states.rules[n].unique().tolist() for n in range(5)] == [[0], [30], [20], [10], [40]]


def test_sizes(checkpoint):
    folder, _ = checkpoint("llama")
    assert load(folder, kv_offloading_size="auto").host is None, "pages are in host memory already"
    assert load(folder, kv_offloading_size="none").num_host_pages == 0
    runner = load(folder, kv_offloading_size="0.01", page_size=16)
    page = runner.pool.nbytes // runner.num_pages
    assert runner.num_host_pages == int(0.01 * (1 << 30)) // page
    assert runner.host.nbytes == runner.num_host_pages * page
    with pytest.raises(ValueError, match=r"kv_offloading_size: 107374.2 GB, of .* that are available"):
        load(folder, kv_offloading_size="100000")
    for wrong in ("much", "-1", "1e3"):
        with pytest.raises(ValueError, match="--kv-offloading-size"):
            check(WorkerConfig(kv_offloading_size=wrong))


def test_available_memory_is_that_of_the_container(tmp_path):
    assert available_bytes() > 0
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:   4000 kB\n")
    assert available_bytes(tmp_path) == 4000 << 10
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.current").write_text("1000000\n")
    (group / "memory.max").write_text("max\n")
    assert available_bytes(tmp_path) == 4000 << 10
    (group / "memory.max").write_text("3000000\n")
    assert available_bytes(tmp_path) == 2_000_000
    (group / "memory.stat").write_text("anon 500000\ninactive_file 400000\nactive_file 100000\n")
    assert available_bytes(tmp_path) == 2_400_000, "cached files are given up when memory is needed"
    (group / "memory").mkdir()
    (group / "memory/memory.limit_in_bytes").write_text("1500000\n")
    (group / "memory/memory.usage_in_bytes").write_text("1600000\n")
    assert available_bytes(tmp_path) == 0
    (group / "memory/memory.stat").write_text("inactive_file 1\ntotal_inactive_file 300000\n")
    assert available_bytes(tmp_path) == 200_000


def test_all_ranks_together_get_what_is_asked_for(monkeypatch):
    """Rank 0 compares that with what is available; when others ask, some of it may be taken already."""
    monkeypatch.setattr("radixrt.worker.execution.host_pool.available_bytes", lambda: 3 << 30)
    config, cpu = WorkerConfig(kv_offloading_size="4"), torch.device("cpu")
    with pytest.raises(ValueError, match="4.3 GB, of 3.2 GB"):
        host_bytes(config, cpu, Shard(0, 2))
    assert host_bytes(config, cpu, Shard(1, 2)) == 2 << 30
    assert host_bytes(WorkerConfig(kv_offloading_size="3"), cpu, Shard(0, 2)) == 3 << 29


def test_what_holds_no_page_is_refused(checkpoint):
    folder, _ = checkpoint("llama")
    assert load(folder, max_total_tokens=480, kv_offloading_size="0").host is None
    with pytest.raises(ValueError, match="kv_offloading_size: 1073 bytes do not hold two pages"):
        load(folder, max_total_tokens=480, kv_offloading_size="0.000001", page_size=16)


class OtherRanks:
    """A group whose other ranks have a certain number of slots."""

    shard = Shard(0, 2)

    def __init__(self, slots: int) -> None:
        self._slots = slots

    def smallest(self, number: int) -> int:
        return min(self._slots, number)


def test_all_ranks_have_as_many_states_and_pages():
    spec = MambaSpec(frozenset({0, 1}), 2, 4, 1, 6, 4, conv_bias=False, bias=False, out_bias=False)
    cpu = torch.device("cpu")
    pool = KVPool(1, 4, 1, 8, torch.float32, cpu)
    states, memory = StatePool(spec, 5, torch.bfloat16, cpu), torch.zeros(1 << 16, dtype=torch.uint8)
    host = HostPool(pool, 1, memory, OtherRanks(3), states, 10)
    assert (host.num_states, host.slots) == (4, 3)


@pytest.mark.parametrize(("asked", "locks", "theirs"), [("auto", False, 100), ("auto", True, 0), ("1", False, 100)])
def test_memory_that_cannot_be_locked(asked, locks, theirs, monkeypatch):
    """By default a worker starts without it, and so does one whose other rank cannot lock it."""
    pytest.importorskip("triton")
    from radixrt.worker.cuda.host import host_pool as cuda_host_pool
    from radixrt.worker.cuda.host import pinned

    def locked(memory: pinned.PinnedMemory) -> torch.Tensor:
        if not locks:
            raise ValueError("CUDA error 2")
        return torch.zeros(1 << 20, dtype=torch.uint8)

    monkeypatch.setattr(pinned.PinnedMemory, "_locked", locked)
    monkeypatch.setattr(pools, "host_bytes", lambda *args: 1 << 20)
    monkeypatch.setattr(
        cuda_host_pool, "CudaHostPool", lambda pool, size, memory, *more: HostPool(pool, size, memory.wait(), *more)
    )
    pool = KVPool(1, 20, 1, 8, torch.float32, torch.device("cpu"))
    loaded = SimpleNamespace(device=torch.device("cuda"))
    finish = pools.begin_host(WorkerConfig(kv_offloading_size=asked), loaded, OtherRanks(theirs), by_torch=False)
    if asked == "auto":
        assert finish(pool, None) is None
    else:
        with pytest.raises(ValueError, match="kv_offloading_size: .* cannot be page-locked: CUDA error 2"):
            finish(pool, None)


def test_by_default_the_gpus_of_a_machine_share_a_quarter(monkeypatch):
    monkeypatch.setattr("radixrt.worker.execution.host_pool.available_bytes", lambda: 800 << 30)
    monkeypatch.setattr("radixrt.worker.execution.host_pool.gpu_count", lambda: 8)
    for gpu_gigabytes, expected in ((80, 25), (16, 16)):
        monkeypatch.setattr("torch.cuda.mem_get_info", lambda device, n=gpu_gigabytes: (0, n << 30))
        config, gpu = WorkerConfig(kv_offloading_size="auto"), torch.device("cuda", 0)
        assert host_bytes(config, gpu) == expected << 30
