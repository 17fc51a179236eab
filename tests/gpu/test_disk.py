"""Pages and recurrent states that go through disk, on the GPU: what is read after a restart is what was computed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from radixrt.messages import Sampling
from radixrt.worker.cache import disk_policy
from radixrt.worker.scheduler import state_checkpoints
from tests.gpu.test_models import OF_FAMILY, SIZES, load
from tests.worker.engine import prompts
from tests.worker.families import make_model
from tests.worker.test_disk import DiskEngine

GREEDY = Sampling(max_tokens=24, temperature=0.0, ignore_eos=True)


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """Small models compute faster than anything is read."""
    monkeypatch.setattr(disk_policy, "READ_SECONDS", -1e9)
    monkeypatch.setattr(disk_policy, "MIN_WAIT", 30.0)


def served(folder: Path, disk: Path, asked, **settings):
    """(answers, cached tokens, figures, tokens from disk) of a worker that is started, asked and ended."""
    config = {"kv_cache_dtype": "fp8_e4m3", "enforce_eager": False, "deterministic": True} | settings
    runner = load(folder, kv_disk_path=str(disk), kv_disk_size=4.0, **config)
    engine = DiskEngine(runner, chunk=512, rows=16, max_model_len=2048)
    ids = [engine.add(prompt, GREEDY) for prompt in asked]
    engine.rest()
    found = [engine.tokens(id) for id in ids], [engine.last(id).cached_tokens for id in ids]
    figures, size = engine.cache.tier.figures, runner.page_size
    runner.close()
    return *found, figures, size


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"page_size": 16, "kv_cache_dtype": "bfloat16"},
        {"enforce_eager": True, "kv_offloading_size": "none"},
        {"kv_cache_dtype": "fp8_e5m2", "max_total_tokens": 4096},
    ],
)
def test_after_a_restart_nothing_is_computed_but_last_tokens(tmp_path, settings):
    """Exact, so that warm is cold. With few pages, most of them go to host memory while they are written."""
    model = tmp_path / "llama"
    model.mkdir()
    make_model(model, "llama", **SIZES)
    asked = prompts(12, 600, 900, vocab_size=4096)
    settings = {"max_total_tokens": 16_384} | settings
    cold, cached, figures, _ = served(model, tmp_path / "disk", asked, **settings)
    assert not any(cached) and not figures.lost_tokens
    turns = [prompt + answer + [7, 8, 9] for prompt, answer in zip(asked, cold, strict=True)]
    expected, *_ = served(model, tmp_path / "none", turns, **settings)
    warm, cached, figures, size = served(model, tmp_path / "disk", turns, **settings)
    assert warm == expected
    assert not figures.failed
    whole = [have >= (len(turn) - 4) // size * size for have, turn in zip(cached, turns, strict=True)]
    # Without host memory, what comes at a time is what fits in the memory that pages pass through: a long context.
    if settings.get("kv_offloading_size") == "none":
        assert any(whole)
    else:
        assert all(whole) and figures.hits == len(turns)


@pytest.mark.parametrize(
    ("family", "settings"),
    [("qwen3_next", {}), ("qwen3_next", {"page_size": 16, "enforce_eager": True}), ("lfm2", {}), ("deepseek_v2", {})],
)
def test_states_and_latent_pages_survive_a_restart(tmp_path, family, settings):
    model = tmp_path / family
    model.mkdir()
    make_model(model, family, **SIZES | OF_FAMILY[family])
    asked = prompts(6, 600, 900, vocab_size=4096)
    settings = {"max_total_tokens": 16_384} | settings
    if family != "deepseek_v2":
        settings["max_mamba_cache_size"] = 48
    cold, *_ = served(model, tmp_path / "disk", asked, **settings)
    turns = [prompt + answer + [7, 8, 9] for prompt, answer in zip(asked, cold, strict=True)]
    expected, *_ = served(model, tmp_path / "none", turns, **settings)
    warm, cached, figures, size = served(model, tmp_path / "disk", turns, **settings)
    assert warm == expected
    least = [len(prompt) - state_checkpoints.TAIL for prompt in asked]
    assert all(have >= want - want % size for have, want in zip(cached, least, strict=True))
    assert figures.hits == len(turns) and not figures.failed


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")
def test_each_rank_keeps_its_part(tmp_path):
    """Each worker is a process of its own, as a process can have only one group of GPUs."""
    model = tmp_path / "llama"
    model.mkdir()
    make_model(model, "llama", **SIZES)
    asked = prompts(6, 600, 900, vocab_size=4096)

    def run(disk: str, asked) -> dict:
        command = [sys.executable, "-m", "tests.gpu.test_disk", str(model), str(tmp_path / disk)]
        done = subprocess.run(
            command, input=json.dumps(asked), capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return json.loads(done.stdout.splitlines()[-1])

    cold = run("disk", asked)
    turns = [prompt + answer + [7, 8, 9] for prompt, answer in zip(asked, cold["answers"], strict=True)]
    expected, warm = run("none", turns), run("disk", turns)
    assert warm["answers"] == expected["answers"]
    assert all(have >= len(turn) - 4 for have, turn in zip(warm["cached"], turns, strict=True))
    assert warm["hits"] == len(turns)


def main(model: str, disk: str) -> None:
    disk_policy.READ_SECONDS, disk_policy.MIN_WAIT = -1e9, 30.0
    settings = {"tensor_parallel_size": 2, "max_total_tokens": 16_384}
    answers, cached, figures, _ = served(Path(model), Path(disk), json.load(sys.stdin), **settings)
    print(json.dumps({"answers": answers, "cached": cached, "hits": figures.hits}))


if __name__ == "__main__":
    main(*sys.argv[1:])
