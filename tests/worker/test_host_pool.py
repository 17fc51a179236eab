"""Pages that go to host memory and come back, with models; how much memory they get."""

from __future__ import annotations

import pytest

from radixrt.config import WorkerConfig, check, resolve
from radixrt.worker.loading import load_runner
from radixrt.worker.memory import available_bytes
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
        ("llama", {"tensor_parallel_size": 2}),
        ("gemma4_text", {"page_size": 4}),
        ("deepseek_v32", {}),
    ],
)
def test_what_comes_back_is_what_was_computed(checkpoint, family, settings):
    """The pool holds two of ten prompts; in the second round nothing is computed but last tokens."""
    folder, _ = checkpoint(family)
    asked = prompts(10, 180, 200)
    runner = load(folder, max_total_tokens=480, **settings)
    try:
        engine = Engine(runner, chunk=64, rows=2)
        cold = engine.generate(asked)
        ids = [engine.add(prompt) for prompt in asked]
        engine.finish()
        assert [engine.tokens(id) for id in ids] == cold
        size = runner.page_size
        least = [len(prompt) - 1 - (len(prompt) - 1) % size for prompt in asked]
        assert [engine.last(id).cached_tokens for id in ids] == least
        assert engine.cache.host.fetched_pages > 0 and engine.cache.evicted_tokens == 0
    finally:
        runner.close()


def test_models_with_recurrent_states_have_no_host_memory(checkpoint):
    folder, _ = checkpoint("qwen3_next")
    with pytest.raises(ValueError, match="kv_offloading_size: .* recurrent states"):
        load(folder, max_total_tokens=480)
    assert load(folder, max_total_tokens=480, kv_offloading_size="auto").host is None


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
    (group / "memory").mkdir()
    (group / "memory/memory.limit_in_bytes").write_text("1500000\n")
    (group / "memory/memory.usage_in_bytes").write_text("1600000\n")
    assert available_bytes(tmp_path) == 0
