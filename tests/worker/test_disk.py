"""The disk tier with models and the real store: what is read back after a restart is what was computed."""

from __future__ import annotations

import shutil

import pytest

from radixrt.config import WorkerConfig, resolve
from radixrt.messages import Sampling
from radixrt.worker.cache import disk_policy
from radixrt.worker.load.runner import load_runner
from tests.worker.engine import Engine, prompts

FEW = Sampling(max_tokens=12, temperature=0.0, ignore_eos=True)


class DiskEngine(Engine):
    """An Engine that has a disk tier, and does what the worker's loop does for it."""

    def step(self) -> bool:
        more = super().step()
        if self._inflight is None and (moves := self.cache.tier.drain_idle()) is not None:
            self.runner.move(moves)
            self.cache.tier.applied()
        return more

    def rest(self) -> None:
        """Until all is on disk."""
        while self.step() or self.cache.tier.is_busy:
            pass


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """Tiny models compute faster than anything is read."""
    monkeypatch.setattr(disk_policy, "READ_SECONDS", -1e9)
    monkeypatch.setattr(disk_policy, "MIN_WAIT", 30.0)


def start(model, folder, **settings) -> DiskEngine:
    config = {"model": str(model), "device": "cpu", "dtype": "float32", "max_total_tokens": 2048} | settings
    config = WorkerConfig(**config, kv_disk_path=str(folder), kv_disk_size=0.1)
    return DiskEngine(load_runner(resolve(config)), chunk=64, rows=4)


def served(engine, asked, namespace="", adapter=-1):
    """(answers, cached tokens) of requests that are served together."""
    ids = [engine.add(prompt, FEW, namespace=namespace, adapter=adapter) for prompt in asked]
    engine.rest()
    return [engine.tokens(id) for id in ids], [engine.last(id).cached_tokens for id in ids]


def conversations(model, folder, asked, **settings):
    """(next turns, their answers without a disk that knows them) of prompts that a worker has answered, and left on
    disk, before it ended."""
    engine = start(model, folder, **settings)
    cold, cached = served(engine, asked)
    assert not any(cached)
    turns = [prompt + answer + [7, 8, 9] for prompt, answer in zip(asked, cold, strict=True)]
    engine.runner.close()
    fresh = start(model, folder / "other", **settings)
    expected, _ = served(fresh, turns)
    fresh.runner.close()
    return turns, expected


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {}),
        ("llama", {"page_size": 16, "dtype": "bfloat16", "deterministic": True}),
        ("llama", {"kv_cache_dtype": "fp8_e4m3"}),
        ("llama", {"kv_cache_dtype": "fp8_e5m2", "page_size": 4, "kv_offloading_size": "0.05"}),
        ("gemma4_text", {"page_size": 4}),
        ("deepseek_v32", {}),
        ("deepseek_v32", {"kv_cache_dtype": "fp8_e4m3"}),
        ("gpt_oss", {}),
        ("llama", {"tensor_parallel_size": 2}),
    ],
)
def test_after_a_restart_nothing_is_computed_but_last_tokens(checkpoint, tmp_path, family, settings):
    model, _ = checkpoint(family)
    asked = prompts(3, 50, 60)
    turns, expected = conversations(model, tmp_path, asked, **settings)
    again = start(model, tmp_path, **settings)
    try:
        warm, cached = served(again, turns)
        size = again.runner.page_size
        assert warm == expected
        assert cached == [(len(turn) - 4) // size * size for turn in turns], "all but what the last answer's end adds"
        assert again.cache.tier.figures.hits == 3 and not again.cache.tier.figures.failed
    finally:
        again.runner.close()


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("qwen3_next", {"page_size": 16}),
        ("lfm2", {}),
        pytest.param("qwen3_next", {"tensor_parallel_size": 2}, marks=pytest.mark.slow),
        pytest.param("kimi_linear", {}, marks=pytest.mark.slow),
        pytest.param("nemotron_h", {"dtype": "bfloat16", "deterministic": True}, marks=pytest.mark.slow),
    ],
)
def test_recurrent_states_survive_a_restart(checkpoint, tmp_path, family, settings):
    model, _ = checkpoint(family)
    asked = prompts(2, 100, 120)
    settings = {"max_mamba_cache_size": 8, **settings}
    turns, expected = conversations(model, tmp_path, asked, **settings)
    again = start(model, tmp_path, **settings)
    try:
        warm, cached = served(again, turns)
        assert warm == expected
        size = again.runner.page_size
        least = [(len(prompt) - 16) // size * size for prompt in asked]  # the last checkpoint within a page is lost
        assert all(have >= want for have, want in zip(cached, least, strict=True)), cached
        assert again.cache.tier.figures.hits == 2
    finally:
        again.runner.close()


def test_other_weights_dtypes_and_pages_find_nothing(checkpoint, tmp_path):
    model, _ = checkpoint("llama")
    copy = tmp_path / "model"
    shutil.copytree(model, copy)
    disk, asked = tmp_path / "disk", prompts(1, 50, 60)
    engine = start(copy, disk)
    served(engine, asked)
    engine.runner.close()
    for settings in ({"kv_cache_dtype": "fp8_e4m3"}, {"page_size": 2}, {"kv_cache_dtype": "bfloat16"}):
        other = start(copy, disk, **settings)
        assert served(other, asked)[1] == [0], settings
        other.runner.close()
    weights = next(copy.glob("*.safetensors"))
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1  # trained on, at the same path
    weights.write_bytes(content)
    retrained = start(copy, disk)
    assert served(retrained, asked)[1] == [0]
    retrained.runner.close()


def test_a_key_is_needed_to_read_what_was_written_with_it(checkpoint, tmp_path):
    model, _ = checkpoint("llama")
    keys, asked, disk = [tmp_path / name for name in ("one", "other")], prompts(1, 50, 60), tmp_path / "disk"
    for n, key in enumerate(keys):
        key.write_bytes(bytes([n]) * 32)
    cached = []
    for key in (keys[0], keys[0], keys[1], None):
        engine = start(model, disk, kv_disk_key_file=str(key or ""))
        cached += served(engine, asked)[1]
        engine.runner.close()
    assert cached == [0, len(asked[0]) - 1, 0, 0]


def test_settings_that_cannot_be_followed_are_refused(checkpoint, tmp_path):
    model, _ = checkpoint("llama")
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="kv_disk_path"):
        start(model, tmp_path / "file" / "folder")
    with pytest.raises(ValueError, match="kv-disk-key-file"):
        start(model, tmp_path, kv_disk_key_file=str(tmp_path / "none"))
