"""Drafted tokens on the device: in graphs, with trees, and to the last bit where results are exact."""

from __future__ import annotations

import pytest

from radixrt.messages import Sampling
from tests.gpu.test_models import LATENT, OF_FAMILY, SIZES, count_ties, load, noise
from tests.worker.engine import Engine, prompts
from tests.worker.families import make_model
from tests.worker.test_drafting import Told

FAMILIES = {"llama": {}, "qwen3_moe": {}, "deepseek_v2": LATENT}
RECURRENT = ["qwen3_5_text", "nemotron_h"]
RECURRENT += [pytest.param(x, marks=pytest.mark.slow) for x in ("kimi_linear", "olmo_hybrid", "lfm2", "falcon_h1")]


@pytest.fixture(scope="module", params=[*FAMILIES, *RECURRENT])
def folder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    make_model(path, request.param, **SIZES | (FAMILIES | OF_FAMILY)[request.param])
    return path


def test_exact_results_stay_exact(folder):
    runner = load(folder, deterministic=True, kv_cache_dtype="fp8_e4m3")
    asked = prompts(6, 50, 300, vocab_size=4096)
    kinds = {"temperature": 0.0}, {"temperature": 1.0, "seed": 4, "top_p": 0.9}, {"repetition_penalty": 1.2, "seed": 5}
    for how in kinds:
        sampling = Sampling(max_tokens=48, ignore_eos=True, **how)
        expected = Engine(runner, max_model_len=1200).generate(asked, sampling)
        drafter = Told(True, [prompt + tokens for prompt, tokens in zip(asked, expected, strict=True)])
        assert Engine(runner, max_model_len=1200, drafter=drafter).generate(asked, sampling) == expected
        assert drafter.accepted > 60 and drafter.drafted > drafter.accepted


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "fp8_e4m3"])
def test_graphs_and_trees_with_drafts(folder, kv_dtype):
    """On one trunk, so that rows of one request and of several share it: they part where the margin is noise."""
    trunk = prompts(1, 700, 700, vocab_size=4096, seed=1)[0]
    asked = [trunk + tail for tail in prompts(12, 20, 90, vocab_size=4096)]
    settings = {"kv_cache_dtype": kv_dtype, "enforce_eager": False, "max_num_seqs": 64}
    runner = load(folder, **settings)
    sampling = Sampling(max_tokens=48, temperature=0.0, ignore_eos=True)
    expected = Engine(runner, rows=64, max_model_len=1200).generate(asked, sampling)
    drafter = Told(True, [prompt + tokens for prompt, tokens in zip(asked, expected, strict=True)])
    engine = Engine(runner, rows=64, max_model_len=1200, drafter=drafter)
    found = engine.generate(asked, sampling)
    plain = {"kv_cache_dtype": kv_dtype}
    ties = count_ties(folder, asked, expected, found, 2 * noise(folder, asked[:4], **plain), **plain)
    print(f"{kv_dtype}: {ties} of {len(asked)} sequences part; {drafter.accepted} of {drafter.drafted} tokens right")
    assert drafter.accepted > 60
