"""Models that torch computes on a GPU: with Mamba-2 layers, layers of different heads, or SparseMixer."""

from __future__ import annotations

import pytest

from radixrt.config import WorkerConfig, resolve
from radixrt.worker.loading import load_runner
from tests.worker.engine import Engine, prompts
from tests.worker.families import make_model
from tests.worker.test_models import greedy, wanted

MAMBA, HEADS = "Mamba-2 layers have no kernels", "layers with different heads have no kernels"
REASONS = dict.fromkeys(("nemotron_h", "granitemoehybrid", "bamba", "falcon_h1"), MAMBA)
REASONS |= dict.fromkeys(("gemma4_text", "mimo_v2_flash"), HEADS)
REASONS["phimoe"] = "experts selected by SparseMixer have no kernels"


@pytest.mark.parametrize("family", REASONS)
def test_torch_computes_the_tokens_of_transformers(tmp_path, family, caplog):
    """In float32: one by one, then in one batch, in chunks and from snapshots."""
    reference = make_model(tmp_path, family)
    asked = prompts(6, 5, 150)
    answers = [greedy(reference, prompt, 24) for prompt in asked]
    config = WorkerConfig(str(tmp_path), device="cuda", dtype="float32", max_total_tokens=4096)
    runner = load_runner(resolve(config))
    assert REASONS[family] in caplog.text
    assert [Engine(runner).generate([prompt], wanted(answers))[0] for prompt in asked] == answers
    engine = Engine(runner, chunk=64)
    assert engine.generate(asked, wanted(answers)) == answers
    turns = [[*prompt, *answer] for prompt, answer in zip(asked, answers, strict=True)]
    expected = [greedy(reference, turn, 24) for turn in turns]
    assert engine.generate(turns, wanted(answers)) == expected
