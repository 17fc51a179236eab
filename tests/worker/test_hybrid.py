"""Models with linear attention: that a request goes on from a checkpoint changes nothing, and how the model is read."""

from __future__ import annotations

import json
import shutil
from collections import defaultdict

import pytest
import torch
from safetensors.torch import load_file, save_file

from radixrt.config import WorkerConfig, resolve
from radixrt.messages import Sampling
from radixrt.worker.execution.kv_pool import StatePool
from radixrt.worker.model import read_spec
from radixrt.worker.model.weights.checkpoint import read_json
from radixrt.worker.scheduler import state_checkpoints
from radixrt.worker.setup import make_drafter, most_running
from tests.worker.engine import GREEDY, Engine, prompts
from tests.worker.test_drafting import Told
from tests.worker.test_models import all_logits, computed, greedy, load

FAMILIES = ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid", "kimi_linear", "lfm2"]
FAMILIES += ["granitemoehybrid", "bamba", "nemotron_h", "falcon_h1"]
FEW = Sampling(max_tokens=12, temperature=0.0, ignore_eos=True)


def cached(engine: Engine, *asked: list[int]) -> tuple[list[list[int]], list[int]]:
    """The answers to prompts that come at once, and the tokens of each that were not computed."""
    ids = [engine.add(prompt, FEW) for prompt in asked]
    engine.finish()
    return [engine.tokens(id) for id in ids], [engine.last(id).cached_tokens for id in ids]


ALIKE = ("qwen3_5_text", "qwen3_5_moe_text", "bamba")
"""Families whose layers are others' here."""


@pytest.fixture(scope="module")
def answers():
    """What transformers gave, of each family by the prompt: several tests ask for the same."""
    return defaultdict(dict)


@pytest.fixture(params=[pytest.param(x, marks=pytest.mark.slow) if x in ALIKE else x for x in FAMILIES])
def model(request, checkpoint, answers):
    """(folder, the first 12 tokens that transformers gives after a prompt)"""
    folder, reference = checkpoint(request.param)
    known = answers[request.param]

    def answer(prompt):
        if (key := tuple(prompt)) not in known:
            known[key] = greedy(reference, prompt, 12)
        return known[key]

    return folder, answer


@pytest.mark.parametrize("page_size", [1, 16])
def test_the_next_turn(model, page_size):
    folder, answer = model
    engine = Engine(load(folder, page_size=page_size))
    (prompt,) = prompts(1, 164, 164)
    said, _ = cached(engine, prompt)
    turn = [*prompt, *said[0], *range(20, 60)]
    found, hits = cached(engine, turn)
    assert found == [answer(turn)]
    # In pages of 16, the last one is not full, and the prompt's checkpoint is within its tail.
    assert hits == [len(prompt) + 11 if page_size == 1 else 144]


def test_forks_and_branches(model):
    folder, answer = model
    engine = Engine(load(folder), chunk=100)
    trunk, *others = prompts(4, 150, 150)
    assert cached(engine, *[trunk] * 3) == ([answer(trunk)] * 3, [0] + [150 - state_checkpoints.TAIL] * 2)
    branches = [trunk[:110] + other[:60] for other in others]
    expected = [answer(branch) for branch in branches]
    assert cached(engine, branches[0]) == ([expected[0]], [0]), "nobody knew that it would branch there"
    assert cached(engine, *branches[1:]) == (expected[1:], [110, 110])


@pytest.mark.parametrize("states", [1, 3, *(pytest.param(x, marks=pytest.mark.slow) for x in (2, 30))])
def test_few_states_and_pages(model, states):
    folder, answer = model
    engine = Engine(load(folder, max_total_tokens=600, max_mamba_cache_size=states), chunk=64)
    trunk, *others = prompts(4, 150, 150, seed=1)
    asked = [trunk, *(trunk[:100] + other[:50] for other in others)] * 2
    found, hits = cached(engine, *asked)
    assert found == [answer(prompt) for prompt in asked]
    assert engine.cache.states.total == states and (sum(hits) > 0 or states < 3)


def test_requests_are_resumed(model, monkeypatch):
    monkeypatch.setattr(state_checkpoints, "MIN_CHECKPOINT_TOKENS", 8)
    folder, answer = model
    engine = Engine(load(folder, max_total_tokens=130))
    asked = prompts(4, 40, 50, seed=2)
    assert cached(engine, *asked)[0] == [answer(prompt) for prompt in asked]
    engine = Engine(load(folder, max_total_tokens=130))
    many = [engine.add(prompt, GREEDY) for prompt in asked[:2]]
    engine.finish()
    assert engine.scheduler.preemptions
    for id, prompt in zip(many, asked, strict=False):
        assert engine.tokens(id)[:12] == answer(prompt)


def test_scores_after_a_checkpoint(model, checkpoint):
    folder, _ = model
    prompt, option = prompts(2, 150, 150)
    expected = None
    for warm in (False, True):
        engine = Engine(load(folder))
        if warm:
            cached(engine, prompt)
        id = engine.add([*prompt, *option[:5]], Sampling(max_tokens=0), score_from=150)
        engine.finish()
        assert engine.last(id).cached_tokens == (134 if warm else 0)
        scores = [s for output in engine.outputs[id] for s in output.scores or []]
        expected = expected or scores
        assert len(scores) == 5 and scores == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [
        ("float32", "fp8_e4m3"),
        ("bfloat16", "auto"),
        pytest.param("float32", "auto", marks=pytest.mark.slow),
        pytest.param("bfloat16", "fp8_e4m3", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    "family",
    [
        family if family in ("qwen3_5_text", "nemotron_h") else pytest.param(family, marks=pytest.mark.slow)
        for family in FAMILIES
    ],
)
def test_deterministic_to_the_last_bit(checkpoint, family, dtype, kv_dtype):
    """Logits of a long prompt in one chunk, in many, in company, and after a checkpoint."""
    folder, _ = checkpoint(family)
    settings = {"dtype": dtype, "kv_cache_dtype": kv_dtype, "deterministic": True}
    prompt, *others = prompts(4, 150, 150)
    whole = all_logits(Engine(load(folder, **settings)), prompt)
    for chunk in (1, 33, 100):
        assert torch.equal(all_logits(Engine(load(folder, **settings), chunk=chunk), prompt), whole)
    engine = Engine(load(folder, **settings))
    engine.generate([prompt[:137], prompt[:20] + [3], *others])
    engine.add(prompt, GREEDY)
    plan = engine.scheduler.plan()
    assert plan.starts[0] == 121 and plan.counts[0] == 29, "after the checkpoint of the first prompt"
    assert torch.equal(computed(engine.runner, plan)[0][0], whole[-1])


def test_pages_hold_the_layers_with_attention_alone(checkpoint):
    folder, _ = checkpoint("qwen3_next")
    runner, spec = load(folder, max_mamba_cache_size=7), read_spec(read_json(folder / "config.json"))
    assert spec.attention_layers == (1, 3) and spec.recurrent.layers == {0, 2}
    assert runner.pool.nbytes == 4097 * spec.kv_elements * 4 and spec.kv_elements == 2 * 2 * 2 * 16
    assert runner.num_states == 8 and runner.states.nbytes == 8 * spec.recurrent.state_bytes(4)


def test_states_are_copied_at_once(checkpoint):
    spec = read_spec(read_json(checkpoint("qwen3_next")[0] / "config.json"))
    pool = StatePool(spec.recurrent, 5, torch.float32, torch.device("cpu"))
    for slot in range(5):
        pool.convs[slot], pool.rules[slot] = slot + 1, slot + 1
    pool.copy(torch.tensor([[1, 0, 1], [2, 3, 4]], dtype=torch.int32).numpy())
    for states in (pool.convs, pool.rules):
        assert [float(states[slot].mean()) for slot in range(1, 5)] == [2, 2, 0, 2]


def test_by_default_states_take_no_more_than_half_of_the_memory(checkpoint):
    folder, _ = checkpoint("qwen3_5_text")
    runner = load(folder, max_total_tokens=0)
    assert runner.num_states == 8 * 256 + 1 and runner.states.nbytes <= runner.pool.nbytes
    assert load(folder, max_total_tokens=0, max_num_seqs=2).num_states == 17


@pytest.mark.parametrize(("states", "most"), [(1, 1), (2, 2), (3, 2), (30, 20), (300, 64)])
def test_a_third_of_the_states_is_left_to_checkpoints(checkpoint, states, most):
    config = WorkerConfig("-", max_num_seqs=64)
    assert most_running(config, load(checkpoint("lfm2")[0], max_mamba_cache_size=states)) == most
    assert most_running(config, load(checkpoint("llama")[0])) == 64


@pytest.mark.parametrize("family", FAMILIES)
def test_random_weights(checkpoint, family):
    engine = Engine(load(checkpoint(family)[0], load_format="dummy"))
    assert len(engine.generate(prompts(1, 90, 90), FEW)[0]) == 12


@pytest.mark.parametrize("states", [0, pytest.param(12, marks=pytest.mark.slow)])
def test_drafts_change_nothing(model, states):
    """Of which a third is wrong: the answers, and where the next turn goes on; with 12 states, 3 of drafts."""
    folder, answer = model
    runner = load(folder, max_mamba_cache_size=states)
    asked = prompts(4, 30, 90)
    expected = [answer(prompt) for prompt in asked]
    drafter = Told(False, [prompt + said for prompt, said in zip(asked, expected, strict=True)])
    engine = Engine(runner, drafter=drafter)
    assert cached(engine, *asked)[0] == expected
    assert drafter.drafted > drafter.accepted > (4 if states else 20)
    turns = [[*prompt, *said, 7] for prompt, said in zip(asked, expected, strict=True)]
    assert cached(engine, *turns)[1] == [len(turn) - 2 for turn in turns], "the last token was not computed"
    if not states:
        found = [engine.tokens(id)[:1] for id in range(5, 9)]
        assert found == [answer(turn)[:1] for turn in turns]


@pytest.mark.parametrize("family", [x if x == "lfm2" else pytest.param(x, marks=pytest.mark.slow) for x in FAMILIES])
def test_exact_results_stay_exact_with_drafts(checkpoint, family):
    """Drawn tokens, in bfloat16."""
    runner, asked = load(checkpoint(family)[0], dtype="bfloat16", deterministic=True), prompts(4, 30, 90)
    sampling = Sampling(max_tokens=24, temperature=1.0, seed=4, ignore_eos=True)
    expected = Engine(runner).generate(asked, sampling)
    drafter = Told(False, [prompt + said for prompt, said in zip(asked, expected, strict=True)])
    assert Engine(runner, drafter=drafter).generate(asked, sampling) == expected
    assert drafter.drafted > drafter.accepted > 30


def test_tokens_are_drafted(checkpoint):
    folder, _ = checkpoint("qwen3_5_text")
    config = resolve(WorkerConfig(str(folder), device="cpu", speculative_algorithm="ngram"))
    assert make_drafter(config, load(folder)) is not None


QWEN = {"layer_types": ["linear_attention", "mamba", "full_attention"]}
REFUSED = [
    ("qwen3_5_text", QWEN, "layer_types mamba are not served; linear_attention and full_attention are"),
    ("qwen3_5_text", {"layer_types": ["linear_attention"] * 3}, "layer_types: none is full_attention"),
    ("qwen3_5_text", {"layer_types": ["full_attention"] * 2}, "layer_types has 2 layers, num_hidden_layers is 3"),
    ("qwen3_5_text", {"linear_num_key_heads": 3}, "linear_num_key_heads 3 does not divide 4"),
    ("qwen3_5_text", {"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim is 0, expected a number from 1"),
    ("qwen3_5_text", {"attn_output_gate": False}, "attn_output_gate False is not served"),
    ("qwen3_5_text", {"attention_bias": True}, "attention_bias True is not served"),
    ("qwen3_5_text", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not served"),
    ("olmo_hybrid", {"linear_num_key_heads": 3}, "linear_num_key_heads 3 does not divide 4"),
    ("kimi_linear", {"mla_use_nope": False}, "mla_use_nope False is not served"),
    ("kimi_linear", {"moe_router_activation_func": "softmax"}, "moe_router_activation_func 'softmax' is not served"),
    ("kimi_linear", {"linear_attn_config": 5}, "linear_attn_config is 5, expected an object"),
    ("lfm2", {"layer_types": ["conv", "mamba", "full_attention"]}, "layer_types mamba are not served; conv and"),
    ("lfm2", {"layer_types": ["conv"] * 3}, "layer_types: none is full_attention"),
    ("lfm2", {"layer_types": ["full_attention"]}, "layer_types has 1 layers, num_hidden_layers is 3"),
]


@pytest.mark.parametrize(("family", "changes", "words"), REFUSED)
def test_what_is_not_served_is_named(checkpoint, tmp_path, family, changes, words):
    shutil.copytree(checkpoint(family)[0], tmp_path / "model")
    path = tmp_path / "model/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ValueError, match=words):
        load(tmp_path / "model")


def check_states_are_followed(runner, reference) -> None:
    """All ranks do with states what the first one does: chunks, checkpoints, branches and drafts; cold and warm."""
    engine = Engine(runner, chunk=64)
    trunk, *others = prompts(3, 150, 150)
    asked = [trunk, trunk, *(trunk[:100] + other[:60] for other in others)]
    expected = [greedy(reference, prompt, 12) for prompt in asked]
    for _ in range(2):
        found, hits = cached(engine, *asked)
        assert found == expected
    assert sum(hits) > 300
    drafter = Told(False, [[*prompt, *said] for prompt, said in zip(asked, found, strict=True)])
    assert cached(Engine(runner, drafter=drafter), *asked)[0] == found
    assert drafter.drafted > drafter.accepted > 2


def test_ranks_follow_what_one_does_with_states(checkpoint):
    folder, reference = checkpoint("qwen3_5_text")
    runner = load(folder, tensor_parallel_size=2, max_mamba_cache_size=12)
    try:
        check_states_are_followed(runner, reference)
    finally:
        runner.close()


def test_decays_keep_the_precision_that_they_are_stored_in(checkpoint, tmp_path):
    shutil.copytree(checkpoint("qwen3_5_text")[0], tmp_path / "model")
    path = tmp_path / "model/model.safetensors"
    weights = load_file(path)
    path.unlink()
    weights = {n: x if n.endswith(("A_log", "dt_bias")) else x.bfloat16() for n, x in weights.items()}
    save_file(weights, path, {"format": "pt"})
    heads = load(tmp_path / "model", dtype="bfloat16")._model._layers[0].mixer
    assert torch.equal(heads.rates, -weights["model.layers.0.linear_attn.A_log"].exp())
