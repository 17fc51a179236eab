"""Heads as published models have them, against transformers: cold, warm, and in a batch of decodes by graphs."""

from __future__ import annotations

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.checkpoints import make_model
from tests.gpu.test_models import SIZES, last_logits, load
from tests.worker.engine import GREEDY, Engine, prompts

SHAPES = {  # query heads, KV heads, head size
    "Qwen2.5 0.5B": (14, 2, 64),
    "SmolLM2 135M": (9, 3, 64),
    "TinyLlama": (32, 4, 64),
    "Qwen2.5 7B": (28, 4, 128),
    "Llama 2 7B": (32, 32, 128),
    "a single KV head": (16, 1, 128),
    "heads of 80": (8, 8, 80),
    "Open Llama 3B": (8, 8, 100),
    "heads of 256": (8, 4, 256),
}
DEVICE = "cuda"


@pytest.mark.parametrize("shape", SHAPES)
def test_heads_of_published_models(shape, tmp_path):
    """Against float32, the bfloat16 logits are no farther off than transformers' are, by the median of the prompts."""
    heads, kv_heads, head_dim = SHAPES[shape]
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim}
    sizes["hidden_size"] = heads * (512 // heads // 16 * 16)
    make_model(tmp_path, "llama", **SIZES | sizes)
    theirs, exact = (
        AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype).to(DEVICE).eval()
        for dtype in (torch.bfloat16, torch.float32)
    )
    asked = prompts(7, 20, 900, vocab_size=4096)
    asked += [asked[0] + asked[1][:70], asked[2][:150] + asked[3]]
    runner = load(tmp_path, kv_cache_dtype="bfloat16", enforce_eager=False, max_num_seqs=16)
    errors: dict[str, list[float]] = {"ours": [], "theirs": []}
    for prompt in asked:
        ids = torch.tensor([prompt], device=DEVICE)
        with torch.inference_mode():
            rounded, true = (model(ids).logits[0, -1].float() for model in (theirs, exact))
        for name, logits in (("ours", last_logits(runner, prompt)), ("theirs", rounded)):
            errors[name].append(float((logits - true).norm() / true.norm()))
    ours, rounding = (sorted(errors[name])[len(asked) // 2] for name in ("ours", "theirs"))
    print(f"relative error of logits to float32: {ours:.2e}, transformers' {rounding:.2e}")
    assert ours < 1.15 * rounding
    short = msgspec.structs.replace(GREEDY, max_tokens=12)
    alone = [Engine(runner, chunk=256, max_model_len=2048).generate([prompt], short)[0] for prompt in asked[:3]]
    together = Engine(runner, chunk=256, max_model_len=2048)
    warm = [together.generate(asked, short) for _ in range(2)][1]
    same = sum(a == b for one, other in zip(alone, warm, strict=False) for a, b in zip(one, other, strict=True))
    assert same >= 18, "a batch of warm decodes says nearly what each says alone; random weights leave narrow margins"
