"""gpt-oss with experts in MXFP4: as they are read, and a model that keeps them so."""

from __future__ import annotations

import pytest
import torch

from radixrt.worker.model.layers.mxfp4 import dequantize
from tests.gpu.test_models import OF_FAMILY, SIZES, last_logits, load
from tests.worker.engine import Engine, prompts
from tests.worker.families import make_model
from tests.worker.packed import pack_experts


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """Folder of a checkpoint. Its scales are 2^-7 to 2^-2: what experts add is large, so that a fault in them shows."""
    folder = tmp_path_factory.mktemp("gpt_oss_mxfp4")
    pack_experts(folder, make_model(folder, "gpt_oss", **SIZES | OF_FAMILY["gpt_oss"]))
    return folder


def test_mxfp4_is_dequantized_as_on_a_cpu():
    """All bytes, all scales, those of subnormal numbers and of NaN among them."""
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 16, 16).repeat(256, 1, 1)
    scales = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 16)
    for dtype in (torch.bfloat16, torch.float32):
        expected = dequantize(blocks, scales, dtype)
        found = dequantize(blocks.cuda(), scales.cuda(), dtype).cpu()
        assert torch.equal(found.isnan(), expected.isnan()) and expected[-1].isnan().all()
        assert torch.equal(found.nan_to_num(), expected.nan_to_num())


def test_a_model_that_keeps_them_has_the_logits_of_one_that_does_not(packed):
    """By the median error in norm: rounding may pick another expert. A prompt of a few tokens is a step of few rows."""
    kept, expanded = load(packed), load(packed, quantization="none")
    assert [r._model.has_unquantized_experts for r in (kept, expanded)] == [False, True]
    asked = prompts(5, 3, 9, vocab_size=4096) + prompts(7, 50, 900, vocab_size=4096)
    both = [(last_logits(kept, prompt), last_logits(expanded, prompt)) for prompt in asked]
    errors = sorted(float((a - b).norm() / b.norm()) for a, b in both)
    print("relative error of logits:", [f"{x:.1e}" for x in errors])
    assert errors[len(errors) // 2] < 2e-2


def test_its_graphs_give_what_its_kernels_give(packed):
    asked = prompts(16, 20, 300, vocab_size=4096)
    found = [
        Engine(load(packed, enforce_eager=eager, max_num_seqs=16), chunk=8192, rows=16).generate(asked)
        for eager in (True, False)
    ]
    assert found[0] == found[1]


def test_it_is_exact_where_it_is_to_be(packed):
    asked = prompts(6, 100, 300, vocab_size=4096)
    settings = {"deterministic": True, "enforce_eager": False}
    alone = [Engine(load(packed, **settings), chunk=8192).generate([prompt])[0] for prompt in asked]
    engine = Engine(load(packed, **settings), chunk=100)
    assert engine.generate(asked) == alone and engine.generate(asked) == alone
