"""Models that transformers computes, all but their attention (`--model-impl transformers`)."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from radixrt.config import WorkerConfig, resolve
from radixrt.messages import Sampling
from radixrt.worker.load.runner import load_runner
from tests.worker.engine import GREEDY, Engine, prompts

SAMPLED = Sampling(max_tokens=64, temperature=1.0, top_p=0.9, seed=7, ignore_eos=True)


def load(folder, **settings):
    fields = {"model": str(folder), "device": "cpu", "max_total_tokens": 4096, "model_impl": "transformers"}
    return load_runner(resolve(WorkerConfig(**fields | settings)))


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_it_gives_the_tokens_of_our_own_llama(checkpoint, sampling):
    folder, _ = checkpoint("llama")
    asked = prompts(8, 5, 80)
    answers = Engine(load(folder, model_impl="auto")).generate(asked, sampling)
    engine = Engine(load(folder, page_size=4), chunk=24)
    assert engine.generate(asked, sampling) == answers, "cold, in chunks"
    assert engine.generate(asked, sampling) == answers, "warm"


def test_a_models_weights_may_be_random(checkpoint):
    folder, _ = checkpoint("opt")
    answers = [Engine(load(folder, load_format="dummy", seed=seed)).generate(prompts(2, 5, 9)) for seed in (1, 1, 2)]
    assert answers[0] == answers[1] != answers[2]


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("bloom", {}, "layers use transformers' attention interface 0 times"),
        ("bart", {"decoder_layers": 2}, "more than attention mixes its tokens, or tells where they are"),
        ("bert", {}, "attention to later tokens"),
        ("doge", {}, "masks of its own"),
        ("falcon", {}, "attention of its own"),
        ("gpt_oss", {}, "it has experts"),
        ("minicpm3", {}, "keys and values differ in size"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "of the kind dynamic"),
    ],
)
def test_a_model_that_cannot_be_served_is_refused(checkpoint, family, changes, words):
    folder, _ = checkpoint(family, **changes)
    with pytest.raises(ValueError, match=f"{family}.*{words}"):
        load(folder)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("tensor_parallel_size", 2),
        ("deterministic", True),
        ("kv_cache_dtype", "fp8_e4m3"),
        ("quantization", "fp8"),
        ("lora_modules", ("a=b",)),
        ("speculative_algorithm", "mtp"),
    ],
)
def test_a_setting_that_cannot_be_served_is_refused(checkpoint, setting, value):
    folder, _ = checkpoint("opt")
    with pytest.raises(ValueError, match=rf"{setting} .* where transformers computes the model"):
        load(folder, **{setting: value})


def test_a_checkpoint_without_a_tensor_is_refused(checkpoint, tmp_path):
    folder, model = checkpoint("helium")
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({name: x for name, x in tensors.items() if "1.mlp.up" not in name}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="has no tensor model.layers.1.mlp.up_proj.weight"):
        load(tmp_path)


def test_layers_that_mix_tokens_without_attention_are_refused(checkpoint, monkeypatch):
    from transformers.models.helium.modeling_helium import HeliumMLP

    folder, _ = checkpoint("helium")
    monkeypatch.setattr(HeliumMLP, "forward", lambda self, x: self.down_proj(self.up_proj(x.cumsum(1))))
    with pytest.raises(ValueError, match="'helium' .*: more than attention mixes its tokens"):
        load(folder)


def test_a_family_that_nobody_has_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "no_such_family"}')
    for impl, words in (("radixrt", "are$"), ("auto", "and those that transformers has$")):
        with pytest.raises(ValueError, match=f"'no_such_family' is not served.*{words}"):
            load(tmp_path, model_impl=impl)


def test_logits_do_not_depend_on_how_a_step_is_split(checkpoint):
    """The head is computed for wanted tokens alone."""
    folder, model = checkpoint("gptj")
    prompt = prompts(1, 40, 40)[0]
    engine = Engine(load(folder), chunk=7)
    id = engine.add(prompt, Sampling(max_tokens=0), score_from=1)
    engine.finish()
    scores = [s for output in engine.outputs[id] for s in output.scores or []]
    with torch.inference_mode():
        logprobs = torch.log_softmax(model(torch.tensor([prompt])).logits[0], -1)
    assert scores == pytest.approx([float(logprobs[i - 1, prompt[i]]) for i in range(1, 40)], abs=1e-4)
