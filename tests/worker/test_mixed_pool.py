"""Pools of models whose layers have different heads."""

from __future__ import annotations

import logging
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from radixrt.worker.execution.kv_pool import DTYPES
from radixrt.worker.execution.mixed_pool import MixedKVPool
from radixrt.worker.model.spec.spec import LayerSpec
from tests.worker.engine import Engine, prompts
from tests.worker.families import GEMMA_4_MOE
from tests.worker.test_models import load

CPU = torch.device("cpu")
LAYERS = [LayerSpec(4, 8, 8, 1), LayerSpec(2, 16, 12, 1), LayerSpec(4, 8, 8, 1, source=0)]


@pytest.mark.parametrize("name", DTYPES)
def test_each_layer_has_its_shapes_and_a_slot_is_one_token(name):
    pool = MixedKVPool(LAYERS, (0, 1, 0), 12, DTYPES[name], CPU)
    pool.scales = [(0.5, 2.0), (1.0, 4.0), (9.0, 9.0)]
    slots, written = torch.tensor([3, 11, 7]), []
    for layer, own in enumerate(LAYERS[:2]):
        k, v = torch.randn(3, own.kv_heads, own.head_dim), torch.randn(3, own.kv_heads, own.value_dim)
        pool.write(layer, slots, k, v)
        written.append((k, v))
    tolerance = 0.3 if DTYPES[name].itemsize == 1 else 0.05
    for layer, source in enumerate((0, 1, 0)):
        for found, expected in zip(pool.read(layer, slots, torch.float32), written[source], strict=True):
            assert torch.allclose(found, expected, rtol=tolerance, atol=tolerance)
    elements = 4 * 8 * 2 + 2 * (16 + 12)
    assert pool.slots == 12 and pool.nbytes == 12 * elements * DTYPES[name].itemsize


def test_a_page_takes_what_its_layers_have(checkpoint):
    """Layers that read those of others have none."""
    of_windows, of_full = 2 * 2 * 16, 2 * 32  # K and V: of two heads, and of one
    for changes, each in (({}, of_windows + 2 * of_full), (GEMMA_4_MOE, 2 * of_windows + 2 * of_full)):
        runner = load(checkpoint("gemma4_text", **changes)[0], page_size=4)
        assert runner.pool.nbytes == runner.num_pages * 4 * each * 4, "float32"


def test_tensors_of_k_and_v_that_no_layer_reads_are_no_surprise(checkpoint, tmp_path, caplog):
    """As published Gemma 4 has them."""
    shutil.copytree(checkpoint("gemma4_text")[0], tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    own = {name: x for name, x in tensors.items() if "layers.0.self_attn" in name}
    more = {name.replace("layers.0.", "layers.2."): x.clone() for name, x in own.items()}
    assert len(more.keys() - tensors.keys()) == 3
    for extra, warned in (({}, False), ({"model.layers.2.self_attn.other.weight": torch.zeros(1)}, True)):
        save_file(more | tensors | extra, tmp_path / "model.safetensors")
        load(tmp_path)
        assert ("not used" in caplog.text) == warned


def test_scales_of_layers_without_k_and_v_are_those_of_their_sources(checkpoint, caplog):
    with caplog.at_level(logging.INFO):
        runner = load(checkpoint("gemma4_text")[0], kv_cache_dtype="fp8_e4m3")
    assert runner.pool.scales[2:] == runner.pool.scales[:2]
    assert Engine(runner).generate(prompts(2, 5, 20))
