"""Steps whose kernels between attentions are graphs: up to which size."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from bench.shapes import SHAPES
from radixrt.config import WorkerConfig
from radixrt.worker.cuda.loading import graph_tokens
from radixrt.worker.cuda.pieces import LEAST, SIZES, kept_bytes, most_tokens, sizes_up_to
from radixrt.worker.model import read_spec

LLAMA_1B = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64}


@pytest.mark.parametrize("tokens", [1, 16, 17, 700, 4096, 5000])
def test_sizes_end_with_what_is_asked_for(tokens):
    found = sizes_up_to(tokens)
    assert found[-1] == tokens and found == sorted(set(found))
    assert found[:-1] == [size for size in SIZES if size < tokens]


def test_no_sizes_without_graphs():
    assert sizes_up_to(0) == []


def test_small_layers_have_graphs_of_longer_steps():
    """As measured on an H200 (bench/results/pieces.json): beyond, a step without graphs takes as long or less."""
    large, small = read_spec(SHAPES["llama-8b"]), read_spec(SHAPES["llama-8b"] | LLAMA_1B)
    sparse = read_spec(SHAPES["qwen3-30b"])
    assert most_tokens(read_spec(SHAPES["llama-70b"]), False) == LEAST
    assert 700 <= most_tokens(large, False) <= 1000 and 2500 <= most_tokens(small, False) <= 3000
    assert 2500 <= most_tokens(sparse, False) <= 3300
    assert most_tokens(sparse, True) == SIZES[-1]
    assert most_tokens(large, True) >= 2 * most_tokens(large, False) - 128


@pytest.mark.parametrize(
    ("ranks", "budget", "is_int4", "tokens"),
    [(1, 8192, False, 3072), (1, 8192, True, 4096), (2, 8192, True, 1024), (1, 700, False, 700), (2, 700, True, 700)],
)
def test_no_more_than_a_step_may_have(ranks, budget, is_int4, tokens):
    config = WorkerConfig(tensor_parallel_size=ranks, max_num_batched_tokens=budget)
    loaded, model = SimpleNamespace(spec=read_spec(SHAPES["qwen3-30b"])), SimpleNamespace(is_fp8=False, is_int4=is_int4)
    assert graph_tokens(config, loaded, model) == tokens


def test_bytes_that_graphs_keep():
    spec = read_spec(SHAPES["llama-8b"])
    heads = 2 * 32 * 128
    assert kept_bytes(spec, 0, 2) == 0 and kept_bytes(spec, 20, 2) == 2 * ((16 + 20) * 4096 + 20 * heads)
    linear, plain = read_spec(SHAPES["qwen3.5-9b"]), 16 * 2 * 256
    assert kept_bytes(linear, 16, 2) == 2 * 16 * (4096 + plain + 8192 + 4096 + 64 + 4096)
    latent = read_spec(SHAPES["deepseek-v2-lite"])
    assert kept_bytes(latent, 16, 2) == 2 * 16 * (2048 + 16 * (576 + 512 + 128 + 192))
