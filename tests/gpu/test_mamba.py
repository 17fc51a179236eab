"""Models in float32: with Mamba-2 layers, also of shapes that torch computes on a GPU; with layers whose heads differ;
with experts that SparseMixer selects."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from radixrt.config import WorkerConfig, resolve
from radixrt.worker.load.runner import load_runner
from tests.worker.engine import Engine, prompts
from tests.worker.families import make_model
from tests.worker.test_drafting import Told
from tests.worker.test_models import greedy, wanted

REASON = "Mamba-2 has no kernels for heads"
BY_TORCH = ("nemotron_h", "granitemoehybrid", "bamba", "falcon_h1")
KERNELS: dict[str, dict[str, Any]] = {"gemma4_text": {}, "phimoe": {}}
KERNELS["mimo_v2_flash"] = {"mlp_layer_types": ["dense"] * 3}
"""Without experts: attention multiplies float32 as TF32, and rounding would pick another one now and then."""
KERNELS |= dict.fromkeys(("granitemoehybrid", "bamba"), {"mamba_d_state": 16})
KERNELS |= {"nemotron_h": {"ssm_state_size": 16}, "falcon_h1": {"mamba_d_state": 16, "mamba_d_ssm": 128}}


@pytest.mark.parametrize(("family", "by_torch"), [*((x, True) for x in BY_TORCH), *((x, False) for x in KERNELS)])
def test_tokens_are_those_of_transformers(tmp_path, family, by_torch, caplog):
    """In float32: one by one, then in one batch, in chunks and from checkpoints; graphs and all."""
    reference = make_model(tmp_path, family, **({} if by_torch else KERNELS[family]))
    asked = prompts(6, 5, 150)
    answers = [greedy(reference, prompt, 24) for prompt in asked]
    config = WorkerConfig(
        str(tmp_path), device="cuda", dtype="float32", max_total_tokens=4096, attention_backend="triton",
        max_num_seqs=8, max_num_batched_tokens=256, kv_offloading_size="1",
    )  # fmt: skip
    runner = load_runner(resolve(config))
    assert ("everything by torch" in caplog.text) == (REASON in caplog.text) == by_torch
    clear = [until_tie(reference, prompt, answer) for prompt, answer in zip(asked, answers, strict=True)]
    assert sum(map(len, clear)) > 72
    found = [Engine(runner, rows=8).generate([prompt], wanted(answers))[0] for prompt in asked]
    assert cut(found, clear) == clear
    engine = Engine(runner, chunk=64, rows=8)
    assert cut(engine.generate(asked, wanted(answers)), clear) == clear
    turns = [[*prompt, *answer] for prompt, answer in zip(asked, answers, strict=True)]
    expected = [until_tie(reference, turn, greedy(reference, turn, 24)) for turn in turns]
    assert cut(engine.generate(turns, wanted(answers)), expected) == expected
    drafter = Told(True, turns)
    assert cut(Engine(runner, rows=8, drafter=drafter).generate(asked, wanted(answers)), clear) == clear
    assert drafter.drafted > drafter.accepted > 20


def until_tie(model: torch.nn.Module, prompt: list[int], answer: list[int]) -> list[int]:
    """The tokens before the first whose logit leads by less than sums of float32 in another order may move it."""
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
    best = logits.topk(2, -1).values
    ties = (best[:, 0] - best[:, 1] < 5e-4).nonzero().flatten().tolist()
    return answer[: ties[0]] if ties else answer


def cut(found: list[list[int]], expected: list[list[int]]) -> list[list[int]]:
    return [tokens[: len(known)] for tokens, known in zip(found, expected, strict=True)]
