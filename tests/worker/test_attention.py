"""Attention in torch, and what is in its place, where tokens are not finite."""

from __future__ import annotations

import pytest
import torch

from tests.worker.engine import Engine, prompts
from tests.worker.test_models import all_logits, load

POISON, PLACE = 7, 10
FAMILIES = {
    "llama": {},
    "llama, one KV head": {"num_key_value_heads": 1},
    "mistral": {"sliding_window": 8},
    "gpt_oss": {},
    "gemma2": {},
    "deepseek_v2": {},
    "deepseek_v32": {},
    "qwen3_5_text": {},
    "kimi_linear": {},
    "lfm2": {},
    "nemotron_h": {},
    "falcon_h1": {},
}
SETTINGS = {"plain": {}, "deterministic": {"deterministic": True}, "fp8": {"kv_cache_dtype": "fp8_e4m3"}}


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_token_that_is_nan_does_not_change_those_before_it(checkpoint, family, settings):
    """In the same chunk: neither their logits nor their K and V."""
    folder, _ = checkpoint(family.partition(",")[0], **FAMILIES[family])
    prompt = [token for token in prompts(1, 60, 60)[0] if token != POISON][:40]
    prompt[PLACE] = POISON
    found = []
    for poisoned in (False, True):
        runner = load(folder, **SETTINGS[settings])
        if poisoned:
            with torch.inference_mode():
                runner._model._embedding.weight[POISON] = torch.nan
        engine = Engine(runner)
        logits = all_logits(engine, prompt)
        assert len(logits) == len(prompt) and logits[PLACE].isnan().any() == poisoned
        slots = torch.from_numpy(runner._attention.slots(0, PLACE))
        layers = range(len(runner._model.spec.attention_layers))
        stored = [x for layer in layers for x in runner.pool.read(layer, slots, torch.float32)]
        assert all(x.any() for x in stored)
        found.append((logits[:PLACE], *stored))
    for expected, own in zip(*found, strict=True):
        if settings == "plain":
            assert torch.allclose(own, expected, rtol=1e-5, atol=1e-5)
        else:
            assert torch.equal(own, expected)
