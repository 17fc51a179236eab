"""LoRA adapters on the GPU against models with merged weights, in graphs and without."""

from __future__ import annotations

import numpy as np
import pytest

from radixrt.checkpoint.lora_modules import LoraModule
from radixrt.messages import Sampling
from radixrt.worker.load import pools
from tests.adapters import DENSE, make_adapter, merged
from tests.checkpoints import make_model
from tests.gpu.test_models import SIZES, load
from tests.worker.engine import Engine, prompts

GRAPHS = {"enforce_eager": False, "max_num_seqs": 16, "attention_backend": "triton"}
KINDS = {
    "graphs": GRAPHS,
    "eager": GRAPHS | {"enforce_eager": True},
    "fp8": GRAPHS | {"quantization": "fp8"},
    "deterministic": GRAPHS | {"deterministic": True},
    "float32": GRAPHS | {"dtype": "float32"},
}
CHOSEN = Sampling(max_tokens=16, temperature=0.0, logprobs=1, ignore_eos=True)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(folder, of two adapters, of the model merged with each)."""
    root = tmp_path_factory.mktemp("lora")
    model = make_model(root / "model", "llama", **SIZES)
    adapters = [
        make_adapter(root / "one", model, DENSE, rank=16, seed=1),
        make_adapter(root / "two", model, ("q_proj", "v_proj", "down_proj"), rank=40, seed=2),
    ]
    folders = [root / "merged1", root / "merged2"]
    for adapter, folder in zip(adapters, folders, strict=True):
        merged(model, adapter).save_pretrained(folder)
    return root / "model", adapters, folders


def with_adapters(made, **settings):
    modules = tuple(f"a{number}={path}" for number, path in enumerate(made[1]))
    return load(made[0], enable_lora=True, lora_modules=modules, max_lora_rank=64, **settings)


def generated(engine: Engine, asked: list[list[int]], numbers: list[int]) -> list[tuple[list[int], list[float]]]:
    """(tokens, their log-probabilities) of one batch, in which prompt n has adapter numbers[n]."""
    ids = [
        engine.add(prompt, CHOSEN, namespace=str(number), adapter=number)
        for prompt, number in zip(asked, numbers, strict=True)
    ]
    engine.finish()
    return [
        (engine.tokens(id), [p.logprob for output in engine.outputs[id] for p in output.logprobs or ()]) for id in ids
    ]


def scores(engine: Engine, prompt: list[int], tokens: list[int], adapter: int = -1) -> list[float]:
    id = engine.add(
        prompt + tokens, Sampling(max_tokens=0), score_from=len(prompt), namespace=str(adapter), adapter=adapter
    )
    engine.finish()
    return [score for output in engine.outputs[id] for score in output.scores or []]


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_of_adapters_is_as_their_models(made, kind):
    """By log-probabilities of decodes and of chunks, which round otherwise where weights are merged."""
    settings = KINDS[kind]
    folder, _, folders = made
    asked, numbers = prompts(12, 20, 300, vocab_size=4096), [number % 3 - 1 for number in range(12)]
    engine = Engine(with_adapters(made, **settings), chunk=8192, rows=16, max_model_len=4096)
    found = generated(engine, asked, numbers)
    again = [scores(engine, p, tokens, n) for p, (tokens, _), n in zip(asked, found, numbers, strict=True)]
    engine.runner.close()
    expected, base = [], []
    for number, other in zip((-1, 0, 1), (folder, *folders), strict=True):
        plain = Engine(load(other, **settings), chunk=8192, rows=16, max_model_len=4096)
        for index, (prompt, (tokens, _)) in enumerate(zip(asked, found, strict=True)):
            if number < 0:
                base.append(scores(plain, prompt, tokens))
            if numbers[index] == number:
                expected.append((index, scores(plain, prompt, tokens)))
        plain.runner.close()
    own = np.array([found[index][1] for index, _ in expected])
    chunks, right = np.array([again[index] for index, _ in expected]), np.array([row for _, row in expected])
    without = np.array([base[index] for index, _ in expected])[len(expected) // 3 :]
    apart = [np.abs(one - right).mean() for one in (own, chunks)]
    differs = np.abs(without - right[len(expected) // 3 :]).mean()
    print(f"{kind}: decodes {apart[0]:.5f}, chunks {apart[1]:.5f} from merged; without adapters {differs:.3f}")
    # In FP8 the merged weights are rounded, adapters and all; here only those of the model are.
    assert max(apart) < (1e-3 if kind == "float32" else 0.2 if kind == "fp8" else 0.05)
    assert differs > 5 * max(apart)


def test_deterministic_results_do_not_depend_on_the_batch(made):
    engine = Engine(with_adapters(made, **KINDS["deterministic"]), chunk=8192, rows=16, max_model_len=4096)
    asked, numbers = prompts(12, 20, 300, vocab_size=4096, seed=1), [number % 3 - 1 for number in range(12)]
    together = generated(engine, asked, numbers)
    warm = generated(engine, asked, numbers)
    alone = [generated(engine, [prompt], [number])[0] for prompt, number in zip(asked, numbers, strict=True)]
    assert together == warm == alone
    engine.runner.close()


def test_memory_is_measured_with_adapters(made, monkeypatch):
    """Where the pool has what is left: of 8 GiB, since other processes use the GPU, too."""
    monkeypatch.setattr(pools, "_free_bytes", lambda device: 8 << 30)
    runner = with_adapters(made, **GRAPHS, max_total_tokens=0, gpu_memory_utilization=1.0)
    assert runner.num_pages > 1000 and runner._model.has_adapters
    runner.close()


@pytest.mark.parametrize("kind", ["deterministic", "eager"])
def test_adapters_that_are_put_into_slots_are_as_those_of_the_start(made, kind):
    """After the graphs were captured, and into a slot that another one had. To the last bit where that is exact."""
    settings = {**KINDS["deterministic"], "enforce_eager": kind == "eager"}
    asked, numbers = prompts(12, 20, 300, vocab_size=4096, seed=2), [number % 3 - 1 for number in range(12)]
    engine = Engine(with_adapters(made, **settings), chunk=8192, rows=16, max_model_len=4096)
    expected = generated(engine, asked, numbers)
    engine.runner.close()
    room = {"enable_lora": True, "allow_runtime_lora_updating": True, "max_loras": 1, "max_lora_rank": 48}
    runner = load(made[0], **room, **settings)
    engine = Engine(runner, chunk=8192, rows=16, max_model_len=4096)
    for turn, (slot, adapter) in enumerate(((0, 1), (1, 1), (0, 0))):
        module = LoraModule("a", str(made[1][adapter]))
        runner.put_adapter(slot, module, runner.read_adapter(module))
        found = generated(engine, asked, [number if number < 0 else slot for number in numbers])
        assert turn == 2 or found != expected
        engine.cache.clear()  # the engine's namespaces do not tell versions apart
    assert generated(engine, asked, numbers) == expected
    runner.close()
