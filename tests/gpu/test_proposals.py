"""Proposals of a multi-token prediction layer on the device: in graphs, and in texts that are exact."""

from __future__ import annotations

import pytest

from radixrt.messages import Sampling
from tests.gpu.test_models import OF_FAMILY, SIZES, load
from tests.worker.engine import Engine, prompts
from tests.worker.families import make_model
from tests.worker.multi_token import add_layer
from tests.worker.test_predictor import COUNT, Always


@pytest.fixture(
    scope="module", params=["deepseek_v3", pytest.param("glm4_moe", marks=pytest.mark.slow), "qwen3_5_text"]
)
def made(request, tmp_path_factory):
    """(folder, reference)"""
    path = tmp_path_factory.mktemp("mtp")
    model = make_model(path / "plain", request.param, **SIZES | OF_FAMILY.get(request.param, {}))
    return path / request.param, add_layer(path / "plain", model, path / request.param)


def test_exact_results_stay_exact(made):
    folder, _ = made
    settings = {"deterministic": True, "kv_cache_dtype": "fp8_e4m3", "enforce_eager": False, "max_num_seqs": 16}
    runner = load(folder, speculative_algorithm="mtp", **settings)
    asked = prompts(6, 50, 300, vocab_size=4096)
    for how in ({"temperature": 0.0}, {"temperature": 1.0, "seed": 4}, {"repetition_penalty": 1.2, "seed": 5}):
        sampling = Sampling(max_tokens=32, ignore_eos=True, **how)
        expected = Engine(runner, rows=16, max_model_len=1200).generate(asked, sampling)
        drafter = Always(runner)
        assert Engine(runner, rows=16, max_model_len=1200, drafter=drafter).generate(asked, sampling) == expected
        assert drafter.drafted > 300


WAYS = [
    {"kv_cache_dtype": "bfloat16", "enforce_eager": True},
    {"kv_cache_dtype": "fp8_e4m3", "page_size": 16, "enforce_eager": False},
]


@pytest.mark.parametrize("settings", WAYS, ids=["eager", "graphs, FP8 pages"])
def test_proposals_are_the_reference_s(made, settings):
    """But for rounding to bfloat16, or FP8 pages, which moves some of them."""
    folder, reference = made
    runner = load(folder, speculative_algorithm="mtp", max_num_seqs=16, **settings)
    drafter = Always(runner)
    engine = Engine(runner, chunk=100, rows=16, max_model_len=1200, drafter=drafter)
    engine.generate(prompts(5, 50, 300, vocab_size=4096), Sampling(max_tokens=20, temperature=0.0, ignore_eos=True))
    took = [(tokens, ids) for tokens, ids in drafter.took if len(ids) == COUNT]
    found = [[a == b for a, b in zip(ids, reference.propose(tokens, COUNT), strict=True)] for tokens, ids in took]
    right = [sum(each) / len(found) for each in zip(*found, strict=True)]
    print(f"{folder.name}: of {len(found)} proposals, right are {right}, by number")
    assert len(found) > 30 and right[0] > 0.7
