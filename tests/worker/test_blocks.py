"""Layers that a checkpoint counts one by one become those of the decoder; how Mamba-2 layers are read."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from radixrt.config import WorkerConfig, resolve
from radixrt.worker.load.options import look_up, no_kernels
from radixrt.worker.model import read_spec
from radixrt.worker.model.decoder import Decoder
from radixrt.worker.model.layers.hybrid_layers import paired
from radixrt.worker.model.layers.ops import TorchOps
from radixrt.worker.model.weights.checkpoint import read_json
from radixrt.worker.model.weights.quantized import Products
from radixrt.worker.model.weights.random_weights import RandomWeights
from tests.worker.engine import Engine, prompts
from tests.worker.test_models import all_logits, load

NANO_9B_V2 = "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-"
NANO_3 = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
SIZES = {"model_type": "nemotron_h", "vocab_size": 131_072, "hidden_size": 2688, "num_attention_heads": 32}


@pytest.mark.parametrize(
    ("pattern", "layers"),
    [
        ("M-*-", ((0, 1), (2, 3))),
        ("MM*E", ((0, None), (1, None), (2, 3))),
        ("--M-E*", ((None, 0), (None, 1), (2, 3), (None, 4), (5, None))),
    ],
)
def test_a_mixer_and_the_mlp_after_it_are_one_layer(pattern, layers):
    assert paired(kind in "M*" for kind in pattern) == layers


@pytest.mark.parametrize(("pattern", "layers", "attention", "states"), [(NANO_9B_V2, 31, 4, 27), (NANO_3, 29, 6, 23)])
def test_published_patterns(pattern, layers, attention, states):
    spec = read_spec(SIZES | {"hybrid_override_pattern": pattern, "num_hidden_layers": len(pattern)})
    assert (spec.num_layers, len(spec.attention_layers), len(spec.recurrent.layers)) == (layers, attention, states)
    assert spec.kv_elements == 2 * attention * 8 * 128
    assert spec.recurrent.state_bytes(2) == states * (2 * 3 * (8192 + 2 * 8 * 128) + 4 * 8192 * 128)


def test_pages_and_states_are_those_of_the_layers_that_have_them(checkpoint):
    folder, _ = checkpoint("nemotron_h")
    runner, spec = load(folder, max_mamba_cache_size=7), read_spec(read_json(folder / "config.json"))
    assert spec.attention_layers == (2,) and spec.recurrent.layers == {0, 1, 3}
    assert spec.hybrid_layers == ((0, 1), (2, None), (3, 4), (5, 6), (None, 7)) and spec.experts.layers == {2, 3}
    assert runner.pool.nbytes == 4097 * spec.kv_elements * 4
    assert runner.num_states == 8 and runner.states.nbytes == 8 * spec.recurrent.state_bytes(4)


def logits(folder, **settings) -> torch.Tensor:
    return all_logits(Engine(load(folder, **settings)), prompts(1, 40, 40)[0])


def test_every_tensor_is_used_by_either_of_its_names(checkpoint, tmp_path, caplog):
    folder, model = checkpoint("nemotron_h")
    weights = load_file(folder / "model.safetensors")
    assert "backbone.layers.0.mixer.A_log" in weights and "backbone.layers.6.mixer.experts.7.up_proj.weight" in weights
    model.save_pretrained(tmp_path, save_original_format=False)
    assert "model.layers.0.mixer.A_log" in load_file(tmp_path / "model.safetensors")
    assert torch.allclose(logits(tmp_path), logits(folder), rtol=0, atol=1e-5)
    assert "not used" not in caplog.text


def test_scales_of_pages_are_found_by_the_checkpoints_own_numbers(checkpoint, tmp_path, caplog):
    shutil.copytree(checkpoint("nemotron_h")[0], tmp_path / "model")
    path = tmp_path / "model/model.safetensors"
    weights = load_file(path)
    at = "backbone.layers.3.mixer."
    weights |= {f"{at}{x}_proj.{x}_scale": torch.tensor(scale) for x, scale in (("k", 0.25), ("v", 0.5))}
    path.unlink()
    save_file(weights, path, {"format": "pt"})
    assert load(tmp_path / "model", kv_cache_dtype="fp8_e4m3").pool.scales == [(0.25, 0.5)]
    assert "not used" not in caplog.text


@pytest.mark.parametrize("family", ["nemotron_h", "granitemoehybrid"])
def test_decays_keep_the_precision_that_they_are_stored_in(checkpoint, tmp_path, family):
    shutil.copytree(checkpoint(family)[0], tmp_path / "model")
    path = tmp_path / "model/model.safetensors"
    weights = load_file(path)
    path.unlink()
    kept = ("A_log", "dt_bias", ".D")
    save_file({n: x if n.endswith(kept) else x.bfloat16() for n, x in weights.items()}, path, {"format": "pt"})
    mixer = load(tmp_path / "model", dtype="bfloat16")._model._layers[0].mixer
    at = next(name for name in weights if name.endswith("layers.0.mixer.A_log") or name.endswith("0.mamba.A_log"))
    assert torch.equal(mixer.rates, -weights[at].exp())
    assert torch.equal(mixer.skip, weights[at.replace("A_log", "D")])
    assert torch.equal(mixer.step_bias, weights[at.replace("A_log", "dt_bias")])


@pytest.mark.parametrize("written", [[0.0, 0.3], [0.3, {"__float__": "Infinity"}], None])
def test_time_steps_are_limited_in_prompts_and_answers_alike(checkpoint, tmp_path, written):
    shutil.copytree(checkpoint("nemotron_h")[0], tmp_path / "model")
    path = tmp_path / "model/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"time_step_limit": written}))
    runner = load(tmp_path / "model")
    low, high = runner._model.spec.recurrent.limits
    assert (low, high) == {"[0.0, 0.3]": (0.0, 0.3), "None": (0.0, torch.inf)}.get(str(written), (0.3, torch.inf))
    steps = runner._model._layers[0].mixer.steps(torch.randn(50, 4))
    assert (written is None) == bool((steps < 0.3).any() and (steps > 0.3).any())
    prompt = prompts(1, 40, 40)[0]
    one, many = (all_logits(Engine(load(tmp_path / "model"), chunk=chunk), prompt) for chunk in (1, 512))
    assert (one - many).abs().max() < 1e-4


def test_shapes_without_kernels_on_a_gpu(checkpoint, tmp_path, monkeypatch):
    """Then torch runs the model, with this reason as a warning."""
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    loaded = look_up(resolve(WorkerConfig(str(checkpoint("bamba")[0]), device="cpu")))
    assert no_kernels(loaded) == "Mamba-2 has no kernels for heads of 32 elements and 12 in their state"
    shutil.copy(loaded.folder / "config.json", tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"mamba_d_state": 16}))
    assert no_kernels(look_up(resolve(WorkerConfig(str(tmp_path), device="cpu")))) == ""


def test_an_mlp_alone_at_the_end_in_fp8(checkpoint):
    """Of some tokens it gives what it gives of all; its input is quantized."""
    spec = read_spec(read_json(checkpoint("nemotron_h")[0] / "config.json"))
    assert spec.hybrid_layers[-1][0] is None
    model = Decoder(spec, RandomWeights(0, torch.float32, torch.device("cpu"), Products.ALL))
    x, residual = torch.randn(2, 7, spec.hidden_size)
    last = model._layers[-1]
    assert last.mlp.fp8_scaling is not None
    x, at = last.attention_norm(residual, TorchOps()), torch.tensor([1, 6])
    assert torch.allclose(model.finish(x, residual.clone(), at), model.finish(x, residual.clone())[at], atol=1e-5)


def test_attention_and_a_mixer_in_one_layer(checkpoint):
    """Each layer has pages and a state."""
    folder, _ = checkpoint("falcon_h1")
    runner, spec = load(folder, max_mamba_cache_size=7), read_spec(read_json(folder / "config.json"))
    assert spec.attention_layers == (0, 1) and spec.recurrent.layers == {0, 1}
    assert runner.pool.nbytes == 4097 * spec.kv_elements * 4 == 4097 * 4 * 2 * 2 * 2 * 16
    assert runner.states.nbytes == 8 * spec.recurrent.state_bytes(4)


def test_multipliers_are_rounded_once(checkpoint):
    """In bfloat16, and of one row after the other."""
    folder, _ = checkpoint("falcon_h1")
    weights = load_file(folder / "model.safetensors")
    layer = load(folder, dtype="bfloat16")._model._layers[1]
    stored = weights["model.layers.1.mamba.in_proj.weight"].bfloat16().float()
    sizes, factors = (96, 96, 24, 24, 4), (0.5, 1.5, 0.7, 1.3, 0.9)
    rows = torch.cat([torch.full((n,), 1.25 * factor) for n, factor in zip(sizes, factors, strict=True)])
    assert torch.equal(layer.mixer.recurrent.projection.weight, (stored * rows[:, None]).bfloat16())
    stored = weights["model.layers.1.self_attn.k_proj.weight"].bfloat16().float()
    assert torch.equal(layer.mixer.attention.qkv.weight[64:96], (stored * torch.tensor(0.9 * 0.6)).bfloat16())
