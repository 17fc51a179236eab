"""`radixrt plan`: what it says of a model is what a worker has once it has loaded it."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
import torch

from radixrt import cli
from radixrt.config import NANO, WorkerConfig, resolve
from radixrt.worker.execution.pool_sizes import STATES, divide
from radixrt.worker.load import capacity, pools, runner
from radixrt.worker.load.capacity import GPUS, find_capacity, named_gpus, stored_tensors, tensor_bytes, weight_bytes
from radixrt.worker.load.options import look_up
from radixrt.worker.model.decoder import Decoder
from radixrt.worker.model.parallel.sharding import Shard
from radixrt.worker.model.weights.checkpoint import SafetensorsWeights, read_json
from radixrt.worker.model.weights.quantized import Products, quantization_of
from radixrt.worker.model.weights.random_weights import RandomWeights
from tests.checkpoints import make_tokenizer
from tests.worker import test_integers, test_scaled
from tests.worker.families import BY_TRANSFORMERS, make_model
from tests.worker.packed import pack_experts
from tests.worker.test_gguf import write as write_gguf
from tests.worker.test_published import edit
from tests.worker.thread_group import on_ranks

CPU = torch.device("cpu")
KINDS = {
    "llama": {},
    "deepseek_v3": {},
    "deepseek_v32": {},
    "gemma3_text": {},
    "gemma4_text": {},
    "qwen3_moe": {},
    "qwen3_next": {},
    "nemotron_h": {},
    "falcon_h1": {},
    "phimoe": {},
}
"""GQA, MLA, with index keys, windows, layers that differ, experts, states of linear attention and of Mamba."""


@pytest.fixture(scope="module", params=KINDS)
def folder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    make_model(path, request.param)
    return path


def config(folder, **settings) -> WorkerConfig:
    return resolve(WorkerConfig(**{"model": str(folder), "device": "cpu", "max_num_seqs": 4} | settings))


def planned(folder, **settings):
    return find_capacity(config(folder, **settings), 64)


def test_weights_pages_and_states_are_those_of_a_worker(folder, monkeypatch):
    free = 64 << 20
    monkeypatch.setattr(pools, "_free_bytes", lambda device: free)
    made = runner.load_runner(config(folder, dtype="float32"))
    loaded = look_up(config(folder, dtype="float32"))
    assert weight_bytes(loaded, Products.NONE, False, Shard(), stored_tensors(folder)) == tensor_bytes(made._model)

    plan = planned(folder, dtype="float32", kv_cache_dtype="float32")
    assert made.pool.nbytes == plan.token_bytes["float32"] * made.pool.slots
    states = 0 if made.states is None else made.states.nbytes // made.states.slots
    assert plan.state_bytes == states
    memory = int(pools.CPU_MEMORY_SHARE * free)
    fitting = divide(memory, plan.token_bytes["float32"], states, STATES * 4)
    assert fitting == (max(0, made.num_states - 1), made.num_pages - 1)


def test_without_weights_the_config_says_the_same(folder, tmp_path):
    """Of a checkpoint in the dtype that is served, as published ones are."""
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(folder / "config.json", bare)
    whole, alone = (planned(where).fits[0] for where in (folder, bare))
    assert whole.weight_bytes == pytest.approx(alone.weight_bytes, rel=0.01)  # routers and biases in float32
    assert replace(whole, weight_bytes=0, cache_bytes=0, tokens=0, agents=0) == replace(
        alone, weight_bytes=0, cache_bytes=0, tokens=0, agents=0
    )


@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "nemotron_h"])
def test_weights_of_each_rank(tmp_path, family):
    make_model(tmp_path, family)
    loaded = look_up(config(tmp_path, dtype="float32"))

    def load(group) -> int:
        return tensor_bytes(Decoder(loaded.whole, RandomWeights(0, torch.float32, CPU), group=group))

    assert on_ranks(2, load) == [weight_bytes(loaded, Products.NONE, False, Shard(rank, 2)) for rank in range(2)]


def held(folder, **kept) -> int:
    """What a worker in bfloat16 holds, some weights as they are stored."""
    loaded = look_up(config(folder))
    quantization = quantization_of(loaded.hf_config)
    weights = SafetensorsWeights(folder, torch.bfloat16, CPU, progress=False, quantization=quantization, **kept)
    return tensor_bytes(Decoder(loaded.whole, weights))


def of_plan(folder, products: Products, packed: bool) -> list[int]:
    """Weights by the headers of the files, and by config.json alone."""
    loaded = replace(look_up(config(folder)), dtype=torch.bfloat16)
    return [weight_bytes(loaded, products, packed, Shard(), stored) for stored in (stored_tensors(folder), None)]


@pytest.mark.parametrize("kind", test_scaled.KINDS)
def test_weights_in_fp8(tmp_path, kind):
    make_model(tmp_path / "plain", "llama", **test_scaled.SIZES)
    scales, more = test_scaled.KINDS[kind]
    folder = test_scaled.store(tmp_path / "plain", tmp_path / "fp8", scales, **more)
    narrow = held(folder, products=Products.STORED)
    assert of_plan(folder, Products.STORED, False) == [narrow] * 2
    assert of_plan(folder, Products.NONE, False) == [held(folder)] * 2 and narrow < 0.7 * held(folder)


@pytest.mark.parametrize(("form", "family"), [("awq", "llama"), ("gptq", "llama"), ("w4a16", "qwen3_moe")])
def test_weights_in_int4(tmp_path, monkeypatch, form, family):
    monkeypatch.setattr(test_integers, "GROUP", 32)
    make_model(tmp_path / "made", family, **({"moe_intermediate_size": 64} if "moe" in family else {}))
    folder, _ = test_integers.store(tmp_path / "made", tmp_path, form, ("proj.weight",))
    edit(folder, quantization_config=test_integers.FORMS[form][1] | {"group_size": 32})
    narrow = held(folder, packed=True)
    assert of_plan(folder, Products.NONE, True) == [narrow] * 2
    assert narrow != held(folder), "such small rows are padded to more than 16 bits"


def test_packed_experts(tmp_path):
    model = make_model(tmp_path, "gpt_oss")
    pack_experts(tmp_path, model)
    assert of_plan(tmp_path, Products.NONE, True) == [held(tmp_path, packed=True)] * 2
    assert of_plan(tmp_path, Products.NONE, False)[0] > held(tmp_path, packed=True)


def test_what_transformers_computes_is_on_one_gpu(tmp_path):
    model = make_model(tmp_path, "gpt2", **BY_TRANSFORMERS["gpt2"])
    made = runner.load_runner(config(tmp_path, dtype="float32", max_total_tokens=64))
    plan = find_capacity(config(tmp_path, dtype="float32"), 64, named_gpus(["H100"]), (1, 2))
    assert {fit.ranks for fit in plan.fits} == {1}
    assert plan.weight_bytes == sum(p.nbytes for p in model.parameters())
    assert made.pool.nbytes == plan.token_bytes["float32"] * made.pool.slots
    plan = find_capacity(config(tmp_path), 64, named_gpus(["H100"]), (2,))
    assert plan.too_small["H100"].startswith("transformers computes the model, on one GPU")


def test_a_gguf_file_takes_what_it_is_dequantized_to(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = make_model(tmp_path, "llama")
    make_tokenizer(tmp_path)
    write_gguf(tmp_path / "a.gguf", tmp_path, model)
    of_file, of_folder = planned(tmp_path / "a.gguf"), planned(tmp_path)
    assert of_file.fits == of_folder.fits
    assert of_file.disk_bytes == (tmp_path / "a.gguf").stat().st_size


def test_nano_on_gpus(capsys):
    assert cli.main(["plan", "nano", "--json", "--gpu", "h100", "--gpu", "A100", "--tensor-parallel-size", "1"]) == 0
    plan = json.loads(capsys.readouterr().out)
    fits = [(fit["gpu"], fit["kv_cache_dtype"], fit["is_default"]) for fit in plan["fits"]]
    assert fits == [
        ("H100", "bfloat16", False),
        ("H100", "fp8_e4m3", True),
        ("A100-40GB", "bfloat16", True),
        ("A100-80GB", "bfloat16", True),
    ]
    h100 = plan["fits"][1]
    left = 0.9 * GPUS[5].memory - h100["weight_bytes"] - h100["reserved_bytes"]
    assert h100["tokens"] == left // h100["token_bytes"] and h100["agents"] == h100["tokens"] // plan["context"]
    assert plan["disk_bytes"] == (NANO / "model.safetensors").stat().st_size

    assert cli.main(["plan", "nano", "--gpu", "L4"]) == 0
    text = capsys.readouterr().out
    assert "tokens BF16" in text and "tokens FP8" in text and "\nL4 " in text


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["nano", "--gpu", "TPU"], "--gpu TPU: expected one of A10, L4"),
        (["nano", "--context", "1M"], "--context 1048576: the model serves up to"),
        (["nano", "--context=-1"], "--context -1: expected a number of tokens"),
        ([], "which model? radixrt plan MODEL"),
        (["nowhere/at/all"], "there is no folder"),
        (["nano", "--quantization", "int3"], "--quantization 'int3': expected"),
        (["nano", "--kv-cache-dtype", "int3"], "--kv-cache-dtype 'int3': expected"),
    ],
)
def test_what_is_not_served_is_refused_in_one_line(flags, words, capsys):
    assert cli.main(["plan", *flags]) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1


def test_a_family_that_is_not_served(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "alien"}))
    assert cli.main(["plan", str(tmp_path)]) == 2
    assert "model_type 'alien' is not served" in capsys.readouterr().err


def test_a_model_too_large_and_a_size_that_does_not_divide_it(shared_data, tmp_path):
    (tmp_path / "config.json").write_text(
        (shared_data / "model_configs/meta-llama--Meta-Llama-3.1-70B.json").read_text()
    )
    plan = find_capacity(config(tmp_path), 1 << 15, named_gpus(["L4", "A10", "H200"]), (1,))
    assert {fit.gpu for fit in plan.fits} == set() or plan.fits[0].gpu == "H200"
    assert "leave no memory" in plan.too_small["L4"] and "leave no memory" in plan.too_small["A10"]
    plan = find_capacity(config(tmp_path), 1 << 15, named_gpus(["H200"]), (3,))
    assert "tensor_parallel_size 3 does not divide" in plan.too_small["H200"]
    assert read_json(tmp_path / "config.json")["num_hidden_layers"] == plan.layers


def test_published_sizes(shared_data, tmp_path):
    """Llama 3.1 8B has 8,030,261,248 weights, beside its positions, and 32 layers with 8 heads of 128 elements."""
    (tmp_path / "config.json").write_text(
        (shared_data / "model_configs/meta-llama--Meta-Llama-3.1-8B.json").read_text()
    )
    plan = find_capacity(config(tmp_path), 1 << 15, named_gpus(["H100"]), (1,))
    assert plan.token_bytes == {"bfloat16": 2 * 2 * 32 * 8 * 128, "fp8_e4m3": 2 * 32 * 8 * 128}
    assert plan.weight_bytes == pytest.approx(2 * 8_030_261_248, rel=1e-4)
    assert capacity.attention_of(look_up(config(tmp_path, load_format="dummy")).spec) == plan.attention
