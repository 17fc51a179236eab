"""What is read of LoRA adapters in PEFT's format, and what is refused."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from radixrt.checkpoint.lora_modules import LoraModule
from radixrt.worker.model.lora.adapter import read_adapter
from tests.adapters import make_adapter, merged
from tests.worker.engine import GREEDY, Engine, prompts
from tests.worker.test_lora import load
from tests.worker.test_models import computed


@pytest.fixture(scope="module")
def adapter_of(checkpoint, tmp_path_factory):
    """`adapter_of(**config)` -> (folder of a llama, of an adapter for it)."""
    folder, model = checkpoint("llama")

    def make(**config):
        return folder, make_adapter(tmp_path_factory.mktemp("adapter"), model, ("q_proj", "down_proj"), **config)

    return make


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"use_dora": True}, "DoRA is not served"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is not served"),
        ({"bias": "all"}, "bias 'all' is not served"),
        ({"peft_type": "IA3"}, "peft_type 'IA3'; LORA is served"),
        ({"init_lora_weights": "pissa_niter_4"}, "'pissa_niter_4' changes the base weights"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"lora_alpha": None}, r"adapter_config.json: Expected `float`, got `null` - at `\$.lora_alpha`"),
        ({"lora_alpha": float("inf")}, "model.layers.0.* has the scale inf"),
        ({"r": 0}, r"Expected `int` >= 1 - at `\$.r`"),
        ({"alpha_pattern": ["q_proj"]}, r"Expected `object | null`, got `array` - at `\$.alpha_pattern`"),
        ({"alpha_pattern": {"q_proj(": 3}}, r"has the pattern 'q_proj\(': missing \), "),
        ({"rank": 64}, "its rank is 64; --max-lora-rank 64 serves it"),
        ({"r": 4}, "by adapter_config.json the rank is 4"),
    ],
)
def test_what_is_not_served_is_named(adapter_of, config, words):
    folder, adapter = adapter_of(**config)
    with pytest.raises(ValueError, match=f"--lora-modules a0: .*{words}"):
        load(folder, adapter)


def edited(adapter, edit):
    tensors = load_file(adapter / "adapter_model.safetensors")
    edit(tensors)
    save_file(tensors, adapter / "adapter_model.safetensors")


Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda t: t.update({"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(2)}), "embed_tokens"),
        (lambda t: t.update({"base_model.model.lm_head.lora_A.weight": torch.ones(8, 64)}), "lm_head"),
        (lambda t: t.update({Q.replace("lora_A.weight", "lora_B.bias"): torch.ones(64)}), "lora_B.bias is not served"),
        (lambda t: t.pop(Q), "has only one of lora_A and lora_B"),
        (lambda t: t.update({k.replace("model.model.", "model."): t[k].clone() for k in list(t)}), "has two names"),
        (lambda t: t.update({Q: torch.ones(8, 63)}), r"is \[64, 64\] in the model, in the adapter \[64, 63\]"),
        (lambda t: t.update({k.replace("layers.1", "layers.7"): t.pop(k) for k in list(t)}), "layers.7.* and 1 more"),
    ],
)
def test_tensors_that_are_not_served_are_named(adapter_of, edit, words):
    folder, adapter = adapter_of()
    edited(adapter, edit)
    with pytest.raises(ValueError, match=f"--lora-modules a0: .*{words}"):
        load(folder, adapter)


def test_a_file_that_is_cut_short_is_named(adapter_of):
    folder, adapter = adapter_of()
    file = adapter / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ValueError, match=rf"--lora-modules a0: {file} cannot be read: "):
        load(folder, adapter)


@pytest.mark.parametrize(("family", "target"), [("deepseek_v3", "kv_b_proj"), ("gemma4_text", "per_layer_input_gate")])
def test_other_projections_are_refused(checkpoint, tmp_path, family, target):
    """Those that are absorbed, and those of per-layer inputs."""
    folder, model = checkpoint(family)
    adapter = make_adapter(tmp_path / "one", model, (target,))
    with pytest.raises(ValueError, match=rf"LoRA of layers\.0\.\S*{target}, and \d+ more is not served for this model"):
        load(folder, adapter)


def test_experts_are_refused(checkpoint, tmp_path):
    """Those that older versions of transformers had as linear layers."""
    folder, model = checkpoint("qwen3_moe")
    adapter = make_adapter(tmp_path / "one", model, ("q_proj",))
    name = "base_model.model.model.layers.0.mlp.experts.1.up_proj.lora_"
    edited(adapter, lambda t: t.update({f"{name}A.weight": torch.ones(8, 64), f"{name}B.weight": torch.ones(40, 8)}))
    with pytest.raises(ValueError, match=r"LoRA of layers\.0\.mlp\.experts\.1\.up_proj is not served for this model"):
        load(folder, adapter)


def test_models_whose_weights_are_multiplied_are_refused(checkpoint, tmp_path):
    folder, model = checkpoint("falcon_h1")
    adapter = make_adapter(tmp_path / "one", model, ("q_proj",))
    with pytest.raises(ValueError, match="not served for models of type falcon_h1"):
        load(folder, adapter)


def test_patterns_of_rank_and_alpha(checkpoint, tmp_path):
    folder, model = checkpoint("llama")
    whole = "model.layers.0.mlp.down_proj"
    config = {"rank_pattern": {"down_proj": 3}, "alpha_pattern": {"q_proj": 5, whole: 7}}
    adapter = make_adapter(tmp_path / "one", model, ("q_proj", "down_proj"), **config)
    engine, prompt = Engine(load(folder, adapter)), prompts(1, 30, 30)[0]
    engine.add(prompt, GREEDY, score_from=1, adapter=0)
    found, _ = computed(engine.runner, engine.scheduler.plan())
    with torch.inference_mode():
        expected = merged(model, adapter)(torch.tensor([prompt])).logits[0]
    assert (found - expected).abs().max() < 1e-4


def test_names_of_multimodal_models(checkpoint, tmp_path):
    folder, model = checkpoint("llama")
    adapter = make_adapter(tmp_path / "one", model, ("q_proj",))
    plain = read_adapter(LoraModule("one", str(adapter)), 16).pairs.keys()
    for prefix in ("model.language_model.", "language_model.model."):
        tensors = load_file(adapter / "adapter_model.safetensors")
        other = tmp_path / prefix
        other.mkdir()
        save_file(
            {k.replace("base_model.model.model.", f"base_model.model.{prefix}"): v for k, v in tensors.items()},
            other / "adapter_model.safetensors",
        )
        (other / "adapter_config.json").write_text((adapter / "adapter_config.json").read_text())
        assert read_adapter(LoraModule("one", str(other)), 16).pairs.keys() == plain


DOWN = "base_model.model.model.layers.1.mlp.down_proj.lora_B.weight"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(adapter_of, value):
    folder, adapter = adapter_of()
    edited(adapter, lambda t: t[DOWN][3].fill_(value))
    with pytest.raises(
        ValueError, match=r"--lora-modules a0: model.layers.1.mlp.down_proj.lora_B has values .* finite"
    ):
        load(folder, adapter)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float8_e4m3fn, torch.complex64])
def test_other_dtypes_are_refused(adapter_of, dtype):
    folder, adapter = adapter_of()
    edited(adapter, lambda t: t.update({DOWN: t[DOWN].to(dtype)}))
    with pytest.raises(
        ValueError, match=r"--lora-modules a0: .*down_proj\.lora_B is of dtype \w+, which is not served"
    ):
        load(folder, adapter)


def test_a_rank_that_is_not_served_is_refused_before_its_matrices_are_read(adapter_of, monkeypatch):
    """They may be of any size."""
    _, adapter = adapter_of(rank=64)

    @contextmanager
    def unreadable(*args, **kwargs):
        with safe_open(*args, **kwargs) as file:
            yield SimpleNamespace(
                keys=file.keys, get_slice=file.get_slice, get_tensor=lambda name: pytest.fail(f"{name} was read")
            )

    monkeypatch.setattr("radixrt.worker.model.lora.adapter.safe_open", unreadable)
    with pytest.raises(ValueError, match="its rank is 64; --max-lora-rank 64 serves it"):
        read_adapter(LoraModule("a0", str(adapter)), 16)


@pytest.mark.parametrize("pattern", ["(.+)+_", "(?:[a-z._0-9]*)*!", "(.*){9}!", ".*" * 20 + "!"])
def test_patterns_that_could_be_matched_for_years_are_refused(adapter_of, pattern):
    folder, adapter = adapter_of(rank_pattern={pattern: 8})
    with pytest.raises(ValueError, match="repeats too much"):
        load(folder, adapter)
