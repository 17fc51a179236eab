"""Models with Mamba-2 layers for whose shapes there are no kernels, which torch computes on a GPU; and kernels in
float32."""

from __future__ import annotations

import pytest

from radixrt.config import WorkerConfig, resolve
from radixrt.worker.loading import load_runner
from tests.worker.engine import Engine, prompts
from tests.worker.families import make_model
from tests.worker.test_models import greedy, wanted

KERNELS = {"mamba_d_state": 16}
EACH = {"nemotron_h": {"ssm_state_size": 16}, "falcon_h1": KERNELS | {"mamba_d_ssm": 128}}


@pytest.mark.parametrize("by_torch", [False, True])
@pytest.mark.parametrize("family", ["nemotron_h", "granitemoehybrid", "bamba", "falcon_h1"])
def test_tokens_are_those_of_transformers(tmp_path, family, by_torch, caplog):
    """In float32: one by one, then in one batch, in chunks and from snapshots; graphs and all."""
    reference = make_model(tmp_path, family, **({} if by_torch else EACH.get(family, KERNELS)))
    asked = prompts(6, 5, 150)
    answers = [greedy(reference, prompt, 24) for prompt in asked]
    config = WorkerConfig(
        str(tmp_path), device="cuda", dtype="float32", max_total_tokens=4096, attention_backend="triton",
        max_num_seqs=8, max_num_batched_tokens=256,
    )  # fmt: skip
    runner = load_runner(resolve(config))
    assert ("Mamba-2 has no kernels for heads" in caplog.text) == by_torch
    assert [Engine(runner, rows=8).generate([prompt], wanted(answers))[0] for prompt in asked] == answers
    engine = Engine(runner, chunk=64, rows=8)
    assert engine.generate(asked, wanted(answers)) == answers
    turns = [[*prompt, *answer] for prompt, answer in zip(asked, answers, strict=True)]
    expected = [greedy(reference, turn, 24) for turn in turns]
    assert engine.generate(turns, wanted(answers)) == expected
