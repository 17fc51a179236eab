"""Scales of FP8 pages: of the checkpoint, calibrated, none; what they are worth, and what is said of them."""

from __future__ import annotations

import logging
import math
import shutil

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import DynamicCache

from radixrt.config import WorkerConfig, resolve
from radixrt.worker.load import kv_scales
from radixrt.worker.load.kv_scales import HEADROOM, SMALLEST, calibration_prompts, power_of_two
from radixrt.worker.load.runner import load_runner
from radixrt.worker.plan import Runner
from tests.worker.engine import GREEDY, Engine, prompts

FP8 = {"fp8_e4m3": 448.0, "fp8_e5m2": 57344.0}


def load(folder, **settings) -> Runner:
    return load_runner(
        resolve(WorkerConfig(**{"model": str(folder), "device": "cpu", "max_total_tokens": 512} | settings))
    )


def edit(checkpoint, folder, change, family: str = "llama"):
    """A copy of a checkpoint; `change` gets its tensors by name."""
    shutil.copytree(checkpoint(family)[0], folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def last_logits(runner: Runner, prompt: list[int]) -> torch.Tensor:
    """float32[vocab] after a prompt whose second half reads the pages of the first."""
    engine = Engine(runner, chunk=len(prompt) // 2)
    engine.add(prompt, GREEDY)
    for _ in range(2):
        plan = engine.scheduler.plan()
        logits = runner.logits(plan)
        engine.scheduler.apply(plan, runner.launch(plan)())
    return logits[-1]


def error(folder, **settings) -> float:
    """Of the logits with FP8 pages, relative to the norm of those without."""
    prompt = prompts(1, 200, 200)[0]
    exact = last_logits(load(folder), prompt)
    return float((last_logits(load(folder, **settings), prompt) - exact).norm() / exact.norm())


def multiply(name: str, factor: float):
    """A change that multiplies K (with Q divided) or V (with the output divided): in float32 the logits stay."""
    up, down = {"K": ("k_proj", "q_proj"), "V": ("v_proj", "o_proj")}[name]

    def change(tensors):
        for key, tensor in tensors.items():
            tensor *= factor if up in key else 1 / factor if down in key else 1.0

    return change


@pytest.fixture
def no_calibration(monkeypatch):
    def fail(*_):
        raise AssertionError("calibrated")

    monkeypatch.setattr(kv_scales, "largest_values", fail)


# ---------------------------------------------------------------- a power of two


@given(st.floats(0, width=32, exclude_min=True, allow_infinity=False), st.sampled_from(sorted(FP8.values())))
@example(224.0, 448.0)
@example(math.nextafter(224.0, math.inf), 448.0)
def test_a_scale_is_the_smallest_power_of_two_that_leaves_headroom(largest, limit):
    scale = power_of_two(largest, limit)
    assert math.frexp(scale)[0] == 0.5
    assert HEADROOM * largest / scale <= limit
    assert HEADROOM * largest / (scale / 2) > limit or scale == SMALLEST
    assert torch.tensor(1 / scale, dtype=torch.float32).isfinite()


@pytest.mark.parametrize("largest", [0.0, math.inf, math.nan])
def test_a_layer_without_a_range_has_scale_1(largest):
    assert power_of_two(largest, 448.0) == 1.0


# ---------------------------------------------------------------- of the checkpoint


def state(k_name: str, v_name: str, k: object = 0.75, v: object = 0.3125, layers: int = 2):
    def change(tensors):
        for layer in range(layers):
            for name, value in ((k_name, k), (v_name, v)):
                tensors[f"model.layers.{layer}.self_attn.{name}"] = torch.tensor(value) * (layer + 1)

    return change


@pytest.mark.parametrize(("k_name", "v_name"), kv_scales.NAMES)
@pytest.mark.parametrize("wrap", [float, lambda x: [x]], ids=["scalar", "vector"])
def test_scales_of_the_checkpoint(checkpoint, tmp_path, no_calibration, caplog, k_name, v_name, wrap):
    caplog.set_level(logging.INFO, "radixrt")
    folder = edit(checkpoint, tmp_path / "model", state(k_name, v_name, wrap(0.7), wrap(0.3)))
    v = float(torch.tensor(0.3))
    k = v if k_name == v_name else float(torch.tensor(0.7))
    found = load(folder, dtype="bfloat16", kv_cache_dtype="fp8_e4m3").pool.scales
    assert found == [(k, v), (2 * k, 2 * v)], "float32, as stored"
    assert f"the checkpoint's scales, of K {k:.4g} to {2 * k:.4g}, of V 0.3 to 0.6" in caplog.text


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan, [0.5, 0.5]])
def test_what_is_no_scale_is_named(checkpoint, tmp_path, value):
    folder = edit(checkpoint, tmp_path / "model", state("k_scale", "v_scale", v=value))
    with pytest.raises(ValueError, match=r"model.layers.0.self_attn.v_scale is .*: a scale is one positive number"):
        load(folder, kv_cache_dtype="fp8_e4m3")
    load(folder, kv_cache_dtype="fp8_e4m3", kv_scales="none")
    load(folder, kv_cache_dtype="bfloat16")


def test_scales_of_some_layers_are_not_used(checkpoint, tmp_path, caplog):
    folder = edit(checkpoint, tmp_path / "model", state("k_scale", "v_scale", layers=1))
    found = load(folder, kv_cache_dtype="fp8_e4m3").pool.scales
    assert found == load(checkpoint("llama")[0], kv_cache_dtype="fp8_e4m3").pool.scales
    assert "not used: it has none for layers 1" in caplog.text


# ---------------------------------------------------------------- calibrated


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("qwen3", {}),
        ("mistral", {"sliding_window": 16}),
        ("mixtral", {}),
        ("gpt_oss", {}),
        ("qwen3_next", {}),
    ],
)
@pytest.mark.parametrize("kv_dtype", FP8)
def test_calibration_sees_what_transformers_computes(checkpoint, family, changes, kv_dtype):
    folder, model = checkpoint(family, **changes)
    largest = torch.zeros(2, 2)
    for ids in torch.from_numpy(calibration_prompts(512, 4096, bos_id=0)):
        # A cache that knows of linear attention also knows of windows, and drops what they hide.
        cache = DynamicCache(config=model.config) if family == "qwen3_next" else DynamicCache()
        with torch.inference_mode():
            model(ids[None], None, None, cache)  # by position: its name is not the same in all of transformers 5
        attention = [layer for layer in cache.layers if getattr(layer, "keys", None) is not None]
        seen = [[float(x.abs().max()) for x in (layer.keys, layer.values)] for layer in attention]
        largest = torch.maximum(largest, torch.tensor(seen))
    runner = load(folder, kv_cache_dtype=kv_dtype)
    found = kv_scales.largest_values(runner._model, bos_id=0)
    assert torch.allclose(torch.tensor(found), largest, rtol=1e-4)
    assert runner.pool.scales == [tuple(power_of_two(x, FP8[kv_dtype]) for x in pair) for pair in found]


def test_the_prompts():
    ids = calibration_prompts(512, 4096, bos_id=7)
    assert ids.shape == (4, 256) and (ids[:, 0] == 7).all() and 0 <= ids.min() and ids.max() < 512
    assert (ids == calibration_prompts(512, 4096, bos_id=7)).all(), "the same for every worker"
    assert calibration_prompts(512, 9).shape == (4, 9)
    for unusable in (None, 512, [1, 2]):
        assert (calibration_prompts(512, 9, unusable) == calibration_prompts(512, 9)).all()


def test_dummy_weights_are_calibrated(checkpoint):
    found = load(checkpoint("llama")[0], kv_cache_dtype="fp8_e4m3", load_format="dummy").pool.scales
    assert all(0 < scale < 1 for pair in found for scale in pair)


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
def test_other_pages_have_none(checkpoint, no_calibration, kv_dtype):
    assert load(checkpoint("llama")[0], kv_cache_dtype=kv_dtype).pool.scales == [(1.0, 1.0)] * 2


# ---------------------------------------------------------------- what they are worth


@pytest.mark.parametrize("kv_dtype", FP8)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_calibrated_scales_cost_nothing(checkpoint, family, kv_dtype):
    folder, _ = checkpoint(family)
    auto, none = (error(folder, kv_cache_dtype=kv_dtype, kv_scales=source) for source in ("auto", "none"))
    print(f"{family}, {kv_dtype}: relative logit error {auto:.4f}, with scale 1 {none:.4f}")
    assert auto < 1.1 * none


@pytest.mark.parametrize(
    ("name", "factor", "kv_dtype"),
    [("K", 2.0**-14, "fp8_e4m3"), ("K", 2.0**-20, "fp8_e5m2"), ("V", 2.0**12, "fp8_e4m3"), ("V", 2.0**18, "fp8_e5m2")],
)
def test_calibrated_scales_undo_a_power_of_two(checkpoint, tmp_path, caplog, name, factor, kv_dtype):
    """Tiny K would all be zero, and large V would clip."""
    plain, _ = checkpoint("llama")
    folder = edit(checkpoint, tmp_path / "model", multiply(name, factor))
    prompt = prompts(1, 200, 200)[0]
    logits = [last_logits(load(path, kv_cache_dtype=kv_dtype), prompt) for path in (plain, folder)]
    assert torch.equal(*logits)
    assert "clip" not in caplog.text
    auto = error(folder, kv_cache_dtype=kv_dtype)
    none = error(folder, kv_cache_dtype=kv_dtype, kv_scales="none")
    print(f"{name} times {factor}, {kv_dtype}: relative logit error {auto:.4f}, with scale 1 {none:.4f}")
    assert 4 * auto < none
    for layer in range(2):
        assert (f"layer {layer} {name} (" in caplog.text) == (name == "V")


# ---------------------------------------------------------------- what is said of them


def test_the_report(checkpoint, caplog):
    caplog.set_level(logging.DEBUG, "radixrt")
    folder, _ = checkpoint("llama")
    runner = load(folder, kv_cache_dtype="fp8_e4m3")
    largest = kv_scales.largest_values(runner._model, bos_id=0)
    records = [record for record in caplog.records if record.name == "radixrt.scales"]
    (line,) = [record.getMessage() for record in records if record.levelno == logging.INFO]
    k, v = (max(values) for values in zip(*largest, strict=True))
    assert line.startswith(f"FP8 pages: largest K {k:.4g}, V {v:.4g} of random tokens; least headroom: layer ")
    details = [record.getMessage() for record in records if record.levelno == logging.DEBUG]
    scale = runner.pool.scales[1][0]
    assert len(details) == 4
    assert details[2] == (
        f"layer 1 K: largest {largest[1][0]:.4g}, scale {scale:.4g}, headroom {448 * scale / largest[1][0]:.2f}"
    )
    assert not [record for record in records if record.levelno > logging.INFO]


def test_layers_that_are_not_finite_are_named(checkpoint, tmp_path, caplog):
    def spoil(tensors):
        tensors["model.layers.0.self_attn.v_proj.weight"][3] = math.inf
        tensors["model.layers.1.self_attn.k_proj.weight"][:] = 0

    found = load(edit(checkpoint, tmp_path / "model", spoil), kv_cache_dtype="fp8_e4m3").pool.scales
    assert found[0][0] < 1 and found[0][1] == 1.0 and found[1] == (1.0, 1.0)
    assert "the scale of their FP8 pages is 1: layer 0 V, layer 1 K, layer 1 V" in caplog.text
