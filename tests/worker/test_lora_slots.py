"""LoRA adapters that are put into the slots of a loaded model, against transformers' models with merged weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from radixrt.checkpoint.lora_modules import LoraModule
from radixrt.config import WorkerConfig, resolve
from radixrt.messages import Sampling
from radixrt.worker.load.runner import load_runner
from radixrt.worker.model import read_spec
from radixrt.worker.model.decoder import Decoder
from radixrt.worker.model.lora.adapter import read_adapter
from radixrt.worker.model.lora.lora_slots import Room
from radixrt.worker.model.weights.checkpoint import SafetensorsWeights, read_json
from radixrt.worker.plan import Runner
from tests.adapters import DENSE, make_adapter, merged
from tests.worker.engine import Engine, prompts
from tests.worker.test_lora import FAMILIES, MORE, causal
from tests.worker.test_models import greedy
from tests.worker.thread_group import on_ranks

TWELVE = Sampling(max_tokens=12, temperature=0.0, ignore_eos=True)


def load(folder: Path, **settings) -> Runner:
    """With room for three adapters of ranks up to 20."""
    given = {"model": str(folder), "device": "cpu", "max_total_tokens": 4096, "page_size": 16, "max_lora_rank": 20}
    settings = {"enable_lora": True, "allow_runtime_lora_updating": True, "max_loras": 2} | given | settings
    return load_runner(resolve(WorkerConfig(**settings)))


def put(runner: Runner, slot: int, folder: Path) -> None:
    module = LoraModule(folder.name, str(folder))
    runner.put_adapter(slot, module, runner.read_adapter(module))


def check_replaced(runner: Runner, model: torch.nn.Module, path: Path, targets=DENSE) -> None:
    """One slot after another adapter, while the other slots and the model are in use."""
    engine, prompt = Engine(runner), prompts(1, 40, 40)[0]
    first = make_adapter(path / "first", model, targets, rank=20, seed=1)
    second = make_adapter(path / "second", model, targets[:1], rank=4, seed=2, use_rslora=True)
    other = make_adapter(path / "other", model, targets, rank=8, seed=3)
    for turn, replaced in enumerate((first, second, first)):
        put(runner, 2, replaced)
        if not turn:
            put(runner, 0, other)
        expected = {-1: model, 0: merged(model, other), 2: merged(model, replaced)}
        ids = {slot: engine.add(prompt, TWELVE, namespace=f"{slot} {turn}", adapter=slot) for slot in expected}
        engine.finish()
        for slot, merged_model in expected.items():
            assert engine.tokens(ids[slot]) == greedy(merged_model, prompt, 12), (turn, slot)


def test_a_slot_holds_one_adapter_after_another(checkpoint, tmp_path):
    folder, model = checkpoint("llama")
    check_replaced(load(folder), model, tmp_path)


def test_weights_are_written_where_they_are(checkpoint, tmp_path):
    """A CUDA graph that has read them reads the same memory."""
    folder, model = checkpoint("llama")
    runner = load(folder)
    lora = runner._model._lora
    before = [(place.a.data_ptr(), place.b.data_ptr()) for place in lora._places]
    put(runner, 1, make_adapter(tmp_path / "one", model))
    assert before == [(place.a.data_ptr(), place.b.data_ptr()) for place in lora._places]
    assert all(place.a[1].any() and place.b[1].any() and not place.a[::2].any() for place in lora._places)


@pytest.mark.parametrize(("wrong", "words"), [("rank", "its rank is 32"), ("shape", "is .* in the model"),
                                              ("target", "LoRA of layers.0.self_attn.z_proj")])  # fmt: skip
def test_what_does_not_fit_changes_nothing(checkpoint, tmp_path, wrong, words):
    folder, model = checkpoint("llama")
    runner, prompt = load(folder), prompts(1, 40, 40)[0]
    good = make_adapter(tmp_path / "good", model)
    put(runner, 1, good)
    if wrong == "rank":
        bad = make_adapter(tmp_path / "bad", model, rank=32)
    else:
        from safetensors.torch import load_file, save_file

        bad = make_adapter(tmp_path / "bad", model, seed=5)
        tensors = load_file(bad / "adapter_model.safetensors")
        if wrong == "shape":
            tensors = {name: x[:, :-1].clone() if "down_proj.lora_A" in name else x for name, x in tensors.items()}
        else:
            tensors = {name.replace("layers.0.self_attn.q_proj", "layers.0.self_attn.z_proj"): x
                       for name, x in tensors.items()}  # fmt: skip
        save_file(tensors, bad / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=f"bad: .*{words}"):
        put(runner, 1, bad)
    engine = Engine(runner)
    id = engine.add(prompt, TWELVE, adapter=1)
    engine.finish()
    assert engine.tokens(id) == greedy(merged(model, good), prompt, 12)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "targets", "changes"), [*FAMILIES[1:], *MORE], ids=[family for family, *_ in (*FAMILIES[1:], *MORE)]
)
def test_more_families(checkpoint, tmp_path, family, targets, changes):
    """Every product of theirs has slots, also those that no adapter adds to."""
    folder, model = checkpoint(family, **changes)
    check_replaced(load(folder), model, tmp_path, targets)


def test_the_first_slots_hold_the_adapters_of_the_start(checkpoint, tmp_path):
    folder, model = checkpoint("llama")
    adapter, prompt = make_adapter(tmp_path / "one", model), prompts(1, 40, 40)[0]
    engine = Engine(load(folder, lora_modules=(f"one={adapter}",)))
    id = engine.add(prompt, TWELVE, adapter=0)
    engine.finish()
    assert engine.tokens(id) == greedy(merged(model, adapter), prompt, 12)


def test_ranks_write_their_parts(checkpoint, tmp_path):
    folder, model = checkpoint("qwen2")
    adapters = [make_adapter(tmp_path / str(seed), model, rank=4, seed=seed) for seed in range(2)]
    prompt = prompts(1, 40, 40)[0]

    def act(group):
        weights = SafetensorsWeights(folder, torch.float32, torch.device("cpu"), progress=False)
        decoder = Decoder(read_spec(read_json(folder / "config.json")), weights, group=group, room=Room(2, 16))
        for adapter in adapters:
            decoder.put_adapter(1, read_adapter(LoraModule("a", str(adapter)), 16))
        decoder.use_adapters(torch.ones(len(prompt), dtype=torch.int32))
        return decoder.forward(torch.tensor(prompt), torch.arange(len(prompt)), causal(decoder))

    with torch.inference_mode():
        expected = merged(model, adapters[-1])(torch.tensor([prompt])).logits[0]
        for logits in on_ranks(2, act):
            assert (logits - expected).abs().max() < 1e-4


@pytest.mark.slow
def test_a_worker_of_two_processes(checkpoint, tmp_path):
    """The other rank puts the same adapter into the same slot, between the same steps."""
    folder, model = checkpoint("llama")
    runner = load(folder, tensor_parallel_size=2)
    try:
        check_replaced(runner, model, tmp_path)
    finally:
        runner.close()


def test_room_is_refused_where_adapters_are(checkpoint):
    folder, _ = checkpoint("falcon_h1")
    with pytest.raises(ValueError, match="not served for models of type falcon_h1"):
        load(folder)
