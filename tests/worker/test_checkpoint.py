"""What a checkpoint folder may look like, and what is said of one that cannot be served."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from radixrt.config import WorkerConfig, resolve
from radixrt.worker.load.options import look_up
from radixrt.worker.load.runner import load_runner
from radixrt.worker.model.weights import checkpoint as files
from radixrt.worker.plan import Runner
from tests.checkpoints import make_tokenizer
from tests.worker.engine import Engine, prompts


def load(folder, **settings) -> Runner:
    return load_runner(
        resolve(WorkerConfig(**{"model": str(folder), "device": "cpu", "max_total_tokens": 512} | settings))
    )


@pytest.fixture
def folder(checkpoint, tmp_path):
    """A copy that a test may break."""
    shutil.copytree(checkpoint("llama")[0], tmp_path / "model")
    return tmp_path / "model"


def edit(folder, **changes) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({k: v for k, v in (json.loads(path.read_text()) | changes).items() if v != "REMOVED"}))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "mamba"}, "layers use transformers' attention interface 0 times"),
        ({"model_type": "scaled"}, "model_type 'scaled' is not served"),
        ({"model_type": "REMOVED"}, "model_type '' is not served"),
        ({"hidden_size": "REMOVED"}, "no hidden_size"),
        ({"hidden_act": "swish9"}, "hidden_act 'swish9'"),
        ({"quantization_config": {"quant_method": "aqlm"}}, "quantization_config"),
        ({"intermediate_size": 256}, "gate_proj.weight has shape"),
        ({"num_hidden_layers": 3}, "has no tensor model.layers.2"),
    ],
)
def test_a_config_that_cannot_be_served_is_named(folder, changes, words):
    edit(folder, **changes)
    with pytest.raises(ValueError, match=words.replace("(", r"\(")):
        load(folder)


def test_broken_files_are_named(folder):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ValueError, match="model.safetensors cannot be read"):
        load(folder)
    weights.rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="holds no safetensors; convert its .bin"):
        load(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json is not JSON"):
        load(folder)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"dtype": "int4"}, "dtype 'int4'"),
        ({"kv_cache_dtype": "fp4"}, "--kv-cache-dtype 'fp4'"),
        ({"load_format": "pickle"}, "--load-format 'pickle'"),
        ({"model": "/nowhere/at all"}, "there is no folder /nowhere/at all"),
    ],
)
def test_settings_that_cannot_be_served_are_named(folder, settings, words):
    with pytest.raises(ValueError, match=words):
        load(**({"folder": folder} | ({"folder": settings.pop("model")} if "model" in settings else {}) | settings))


def test_older_config_files(checkpoint, folder):
    """`rope_theta` and `torch_dtype` where transformers 5 writes `rope_parameters` and `dtype`."""
    _, model = checkpoint("llama")
    edit(
        folder,
        rope_parameters="REMOVED",
        rope_theta=10_000.0,
        dtype="REMOVED",
        torch_dtype="float32",
        rope_scaling=None,
    )
    prompt = prompts(1, 20, 20)[0]
    expected = model.generate(
        torch.tensor([prompt]), max_new_tokens=64, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert Engine(load(folder)).generate([prompt])[0] == expected[0, 20:].tolist()


def test_end_of_sequence_ids_come_from_all_files(folder):
    make_tokenizer(folder)  # its end of turn is 2
    edit(folder, eos_token_id=[7, 8])
    (folder / "generation_config.json").write_text('{"eos_token_id": [9, 900]}')
    assert files.eos_ids(folder) == {2, 7, 8, 9, 900}
    assert load(folder).eos_ids == {2, 7, 8, 9}, "900 has no logit"
    edit(folder, eos_token_id=None, text_config={"eos_token_id": 6})  # of a model that sees
    assert files.eos_ids(folder) == {2, 6, 9, 900}


def test_what_is_said_of_text_alone_is_said_of_what_is_served(folder):
    text = {"bos_token_id": 5, "vocab_size": 7, "quantization_config": {"quant_method": "fp8"}}
    edit(folder, bos_token_id=None, text_config=text)
    found = look_up(resolve(WorkerConfig(model=str(folder), device="cpu"))).hf_config
    assert found["bos_token_id"] == 5 and found["quantization_config"] == {"quant_method": "fp8"}
    assert found["vocab_size"] == 512, "the whole comes first"


def test_dummy_weights_need_no_file(folder):
    (folder / "model.safetensors").unlink()
    first = Engine(load(folder, load_format="dummy", seed=1)).generate(prompts(2, 9, 9))
    assert first == Engine(load(folder, load_format="dummy", seed=1)).generate(prompts(2, 9, 9))
    assert first != Engine(load(folder, load_format="dummy", seed=2)).generate(prompts(2, 9, 9))


def test_the_pool_is_sized_by_tokens(folder):
    runner = load(folder, max_total_tokens=512, page_size=16)
    assert runner.num_pages == 33 and runner.pool.nbytes == 33 * 16 * 2 * 2 * 2 * 16 * 4
