"""What does not fit into memory is named by the setting that asks for it, before anything is read."""

from __future__ import annotations

import subprocess

import pytest

from radixrt.config import NANO, WorkerConfig, resolve
from radixrt.worker.load import memory, runner


def load(**settings):
    return runner.load_runner(resolve(WorkerConfig(str(NANO), device="cpu", **settings)))


def test_more_pages_than_memory():
    with pytest.raises(ValueError, match=r"^--max-total-tokens 2000000000: they take 16384\.0 GB.* at most$"):
        load(max_total_tokens=2_000_000_000)


@pytest.mark.parametrize(
    ("dtype", "words"), [("float32", r"0\.0 GB .*, or --dtype bfloat16"), ("bfloat16", r"0\.0 GB .* model$")]
)
def test_more_weights_than_memory(monkeypatch, dtype, words):
    size = (NANO / "model.safetensors").stat().st_size
    monkeypatch.setattr(memory, "available_bytes", lambda: size - 1)
    with pytest.raises(ValueError, match=rf"^the weights of nano take 0\.0 GB in {dtype}, and {words}"):
        load(dtype=dtype)
    monkeypatch.setattr(memory, "available_bytes", lambda: size + 1_000_000)
    if dtype == "bfloat16":
        load(dtype=dtype, max_total_tokens=16).close()


def test_a_container_may_have_less_than_its_machine(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "MEMORY", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    assert memory.available_bytes() is None
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:   7 kB\nSwapFree: 1 kB\n")
    (tmp_path / "memory.stat").write_text("anon 1000\nfile 5000\n")
    for limit, expected in (("max", 8192), ("4096", 3096), ("100000", 8192)):
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        assert memory.available_bytes() == expected


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (MemoryError("Unable to allocate 14 TiB"), "not enough memory: lower --max-total-tokens.*14 TiB"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), "not enough memory"),
        (RuntimeError("Failed to find C compiler. Please specify"), "install gcc and python3-dev, or name a compiler"),
        (subprocess.CalledProcessError(1, ["gcc"]), "install gcc and python3-dev"),
    ],
)
def test_what_the_machine_lacks(monkeypatch, error, words):
    def fail(*_):
        raise error

    monkeypatch.setattr(runner, "make_runner", fail)
    with pytest.raises(ValueError, match=words):
        load()
