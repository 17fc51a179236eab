"""Steps whose kernels between attentions are graphs: up to which size."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bench.shapes import SHAPES
from radixrt.config import WorkerConfig
from radixrt.worker.cuda.graphs.piecewise_graphs import (
    INPUTS_COPIES,
    MIN_GRAPH_TOKENS,
    SIZES,
    PiecewiseGraphs,
    ending,
    kept_bytes,
    most_tokens,
    sizes_up_to,
)
from radixrt.worker.load.cuda_runner import graph_tokens
from radixrt.worker.model import read_spec
from radixrt.worker.model.spec.spec import ModelSpec
from tests.worker.cuda.test_runner import runners
from tests.worker.families import make_model

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
    assert most_tokens(read_spec(SHAPES["llama-70b"]), False) == MIN_GRAPH_TOKENS
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
    loaded, model = (
        SimpleNamespace(spec=read_spec(SHAPES["qwen3-30b"]), by_transformers=False),
        SimpleNamespace(is_fp8=False, is_int4=is_int4),
    )
    assert graph_tokens(config, loaded, model) == tokens


def test_bytes_that_graphs_keep():
    spec = read_spec(SHAPES["llama-8b"])
    heads = 2 * 32 * 128
    assert kept_bytes(spec, 0, 2) == 0 and kept_bytes(spec, 20, 2) == 2 * ((16 + 20) * 4096 + 20 * heads)
    linear, plain = read_spec(SHAPES["qwen3.5-9b"]), 16 * 2 * 256
    assert kept_bytes(linear, 16, 2) == 2 * 16 * (4096 + plain + 8192 + 4096 + 64 + 4096)
    latent = read_spec(SHAPES["deepseek-v2-lite"])
    assert kept_bytes(latent, 16, 2) == 2 * 16 * (2048 + 16 * (576 + 512 + 128 + 192))
    mixers = read_spec(SHAPES["nemotron-h-8b"] | {"num_hidden_layers": 6, "hybrid_override_pattern": "M-M-*-"})
    projected, heads = 8192 + 10240 + 128, 32 * 2 * 128
    assert kept_bytes(mixers, 16, 2) == 2 * 16 * (4096 + heads + projected + 8192)


def test_what_graphs_make_after_the_last_attention():
    """For `Decoder.finish`: nothing, the input of an MLP without a mixer, or results side by side."""
    nemotron = SHAPES["nemotron-h-8b"] | {"num_hidden_layers": 7}
    assert ending(read_spec(nemotron | {"hybrid_override_pattern": "M-M-*-M"})) == 0
    assert ending(read_spec(nemotron | {"hybrid_override_pattern": "M-M*M--"})) == 4096
    falcon = {"model_type": "falcon_h1", "vocab_size": 64, "hidden_size": 256, "intermediate_size": 64, "head_dim": 32}
    falcon |= {"num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": 2}
    assert ending(read_spec(falcon | {"mamba_n_heads": 8, "mamba_d_ssm": 512})) == 8 * 32 + 512


class Recorded:
    """In place of a CUDA graph."""

    open: Recorded | None = None

    def __init__(self) -> None:
        self.is_captured = False

    def capture_begin(self, **_: object) -> None:
        assert Recorded.open is None
        Recorded.open = self

    def capture_end(self) -> None:
        assert Recorded.open is self and not self.is_captured
        Recorded.open, self.is_captured = None, True


def captured(folder, device, monkeypatch) -> tuple[PiecewiseGraphs, ModelSpec]:
    """Graphs of 4 tokens."""
    if device.type == "cuda":
        pytest.skip("tests/gpu captures graphs")
    _, runner = runners(folder)
    runner.bind(np.zeros((8, 64), dtype=np.int32))
    for name in ("graph_pool_handle", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recorded)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    found = PiecewiseGraphs(runner._model, runner._pages, runner._last_tokens, [4])
    assert Recorded.open is None and all(graph.is_captured for graph in found._captured[4].graphs)
    return found, runner._model.spec


@pytest.mark.parametrize("family", ["nemotron_h", "bamba", "falcon_h1"])
def test_graphs_and_what_is_launched_between_them(family, device, tmp_path, monkeypatch):
    """Where mixers are beside attention or in its place; where the last layer has neither, or ends with a mixer."""
    sizes = {"nemotron_h": {"ssm_state_size": 16}, "falcon_h1": {"mamba_d_state": 16, "mamba_d_ssm": 64}}
    make_model(tmp_path, family, **sizes.get(family, {"mamba_d_state": 16}))
    found, spec = captured(tmp_path, device, monkeypatch)
    graphs = found._captured[4].graphs
    cuts = len(spec.attention_layers) + len(spec.recurrent.layers)
    assert (len(found._between), len(graphs)) == (cuts, cuts + (family != "bamba"))
    assert found._captured[4].x.shape == (4, {"nemotron_h": 64, "bamba": 128, "falcon_h1": 64 + 64}[family])


@pytest.mark.parametrize("family", ["gemma4_text", pytest.param("mimo_v2_flash", marks=pytest.mark.slow)])
def test_layers_with_different_heads_use_the_same_buffers(family, device, tmp_path, monkeypatch):
    """As large as the largest heads need."""
    make_model(tmp_path, family)
    found, spec = captured(tmp_path, device, monkeypatch)
    assert len(found._between) == len(found._captured[4].graphs) == spec.num_layers
    for place, own in enumerate(spec.layers):
        q, out = found._heads(place, 4)
        assert q.shape == (4, spec.num_heads, own.head_dim) and out.shape == (4, spec.num_heads, own.value_dim)
        assert q.data_ptr() == found._q.data_ptr() and out.data_ptr() == found._out.data_ptr()
        assert q.is_contiguous() and out.is_contiguous()
    assert found._captured[4].x.shape == out.shape and len(found._captured[4].tokens) == 4
    heads = spec.num_heads * (max(own.head_dim for own in spec.layers) + max(own.value_dim for own in spec.layers))
    inputs = INPUTS_COPIES * spec.num_layers * spec.layer_inputs
    assert kept_bytes(spec, 16, 2) == 2 * 16 * (spec.hidden_size + heads + inputs)
