"""LoRA adapters against transformers' models with merged weights: in one batch, warm and cold, on several ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from radixrt.checkpoint.lora_modules import LoraModule, lora_modules
from radixrt.config import WorkerConfig, resolve
from radixrt.messages import Sampling
from radixrt.worker.load.runner import load_runner
from radixrt.worker.model import read_spec
from radixrt.worker.model.decoder import Decoder
from radixrt.worker.model.layers.fp8 import Fp8Linear, Fp8Weight
from radixrt.worker.model.layers.int4 import Int4, Int4Linear
from radixrt.worker.model.layers.linear import Linear, Product
from radixrt.worker.model.layers.ops import TorchOps
from radixrt.worker.model.lora.adapter import read_adapter
from radixrt.worker.model.lora.lora import LoraLinear, Rows, Stack, add_by_adapter
from radixrt.worker.model.weights.checkpoint import SafetensorsWeights, read_json
from radixrt.worker.plan import Runner
from tests.adapters import DENSE, make_adapter, merged
from tests.worker.engine import GREEDY, Engine, prompts
from tests.worker.test_models import computed, greedy
from tests.worker.thread_group import on_ranks

ALL_BUT_EXPERTS = ("q_proj", "k_proj", "v_proj", "o_proj", "shared_experts.down_proj", "shared_experts.up_proj")
FUSED = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
FAMILIES = [
    ("llama", DENSE, {}),
    ("mistral", DENSE, {}),
    ("qwen2", ("q_proj", "v_proj"), {}),
    ("qwen3", DENSE, {}),
    ("phi3", FUSED, {}),
    ("granite", DENSE, {}),
    ("nemotron_h", ("in_proj", "out_proj", "q_proj", "shared_experts.up_proj"), {}),
]
MORE = [
    ("llama", ("o_proj",), {"attention_bias": True, "mlp_bias": True}),
    ("glm4", ("q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj"), {}),
    ("cohere", DENSE, {}),
    ("olmo2", DENSE, {}),
    ("gemma3_text", DENSE, {}),
    ("qwen3_moe", ("q_proj", "k_proj", "v_proj", "o_proj"), {}),
    ("deepseek_v2", ("q_proj", "kv_a_proj_with_mqa", "o_proj"), {}),
    ("glm4_moe", ALL_BUT_EXPERTS, {}),
    ("gpt_oss", ("q_proj", "k_proj", "v_proj", "o_proj"), {}),
    ("qwen3_next", ("in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj", "o_proj"), {}),
    ("kimi_linear", ("self_attn.q_proj", "o_proj", "f_a_proj", "f_b_proj"), {}),
    ("bamba", ("in_proj", "out_proj", "q_proj"), {}),
    ("lfm2", ("in_proj", "out_proj", "w1", "w2"), {}),
    ("llama4_text", ("q_proj", "o_proj", "shared_expert.gate_proj", "feed_forward.down_proj"), {}),
    ("starcoder2", ("q_proj", "c_fc", "c_proj"), {}),
    ("gemma4_text", ("q_proj", "k_proj", "o_proj", "up_proj"), {}),
]


def load(folder, *adapters, **settings) -> Runner:
    modules = tuple(f"a{number}={path}" for number, path in enumerate(adapters))
    given = {"model": str(folder), "device": "cpu", "max_total_tokens": 4096, "page_size": 16} | settings
    return load_runner(resolve(WorkerConfig(enable_lora=True, lora_modules=modules, **given)))


def two_adapters(path, model, targets=DENSE):
    """Of different ranks, and for different projections."""
    one = make_adapter(path / "one", model, targets, rank=4, seed=1)
    return one, make_adapter(path / "two", model, targets[:1], rank=20, seed=2, use_rslora=True)


def check_logits(path, folder, model, targets):
    """The logits of a batch of the base and two adapters, in one step."""
    adapters = two_adapters(path, model, targets)
    engine = Engine(load(folder, *adapters, max_lora_rank=32))
    asked, numbers = prompts(4, 30, 50), (1, -1, 0, 1)
    for prompt, adapter in zip(asked, numbers, strict=True):
        engine.add(prompt, GREEDY, score_from=1, namespace=str(adapter), adapter=adapter)
    plan = engine.scheduler.plan()
    assert plan.counts.sum() == sum(map(len, asked)), "one step"
    found, _ = computed(engine.runner, plan)
    models = {-1: model} | {number: merged(model, adapter) for number, adapter in enumerate(adapters)}
    of_prompt = {r.tokens.tobytes(): n for n, r in enumerate(engine.scheduler.requests_of(plan))}
    rows = found.split(plan.wants.tolist())
    for prompt, adapter in zip(asked, numbers, strict=True):
        own = rows[of_prompt[_bytes(prompt)]]
        with torch.inference_mode():
            expected = models[adapter](torch.tensor([prompt])).logits[0]
            base = model(torch.tensor([prompt])).logits[0]
        assert (own - expected).abs().max() < 1e-4
        assert adapter < 0 or (base - expected).abs().max() > 0.05, "an adapter that changes nothing tests nothing"


def _bytes(prompt: list[int]) -> bytes:
    return torch.tensor(prompt, dtype=torch.int32).numpy().tobytes()


@pytest.mark.parametrize(("family", "targets", "changes"), FAMILIES, ids=[family for family, *_ in FAMILIES])
def test_logits_are_those_of_merged_weights(checkpoint, tmp_path, family, targets, changes):
    check_logits(tmp_path, *checkpoint(family, **changes), targets)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "targets", "changes"), MORE, ids=[family for family, *_ in MORE])
def test_logits_of_more_families(checkpoint, tmp_path, family, targets, changes):
    check_logits(tmp_path, *checkpoint(family, **changes), targets)


@pytest.mark.parametrize("chunk", [512, pytest.param(24, marks=pytest.mark.slow)])
def test_one_batch_warm_and_cold(checkpoint, tmp_path, chunk):
    """Each gets what its own model says, and again when its prefix is cached; the same prompt under another adapter
    hits nothing."""
    folder, model = checkpoint("llama")
    adapters = two_adapters(tmp_path, model)
    models = {-1: model} | {number: merged(model, adapter) for number, adapter in enumerate(adapters)}
    engine = Engine(load(folder, *adapters, max_lora_rank=32), chunk=chunk)
    prompt = prompts(1, 70, 70)[0]
    expected = {number: greedy(model, prompt, 12) for number, model in models.items()}
    assert len({tuple(tokens) for tokens in expected.values()}) == 3
    sampling = Sampling(max_tokens=12, temperature=0.0, ignore_eos=True)
    for cached in (0, 64):
        ids = {
            number: engine.add(prompt, sampling, namespace=f"tenant\n{number}\n", adapter=number) for number in models
        }
        engine.finish()
        assert {number: engine.tokens(id) for number, id in ids.items()} == expected
        assert [engine.last(id).cached_tokens for id in ids.values()] == [cached] * 3


def test_without_a_namespace_of_its_own_an_adapter_would_read_others_pages(checkpoint, tmp_path):
    """Why an adapter is a part of the namespace: what the test above would see if it were not."""
    folder, model = checkpoint("llama")
    engine = Engine(load(folder, *two_adapters(tmp_path, model), max_lora_rank=32))
    prompt, sampling = prompts(1, 70, 70)[0], Sampling(max_tokens=12, temperature=0.0, ignore_eos=True)
    cold = engine.add(prompt, sampling, namespace="a0", adapter=0)
    engine.add(prompt, sampling, namespace="base")
    engine.finish()
    wrong = engine.add(prompt, sampling, namespace="base", adapter=0)
    engine.finish()
    assert engine.last(wrong).cached_tokens > 0 and engine.tokens(wrong) != engine.tokens(cold)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_have_their_parts(checkpoint, tmp_path, size):
    folder, model = checkpoint("qwen2")
    adapter = make_adapter(tmp_path / "one", model, rank=4)
    prompt = prompts(1, 40, 40)[0]
    with torch.inference_mode():
        expected = merged(model, adapter)(torch.tensor([prompt])).logits[0]

    def act(group):
        weights = SafetensorsWeights(folder, torch.float32, torch.device("cpu"), progress=False)
        module = lora_modules(WorkerConfig(enable_lora=True, lora_modules=(f"one={adapter}",)))[0]
        spec = read_spec(read_json(folder / "config.json"))
        decoder = Decoder(spec, weights, group=group, adapters=[read_adapter(module, 16)])
        decoder.use_adapters(torch.zeros(len(prompt), dtype=torch.int32))
        return decoder.forward(torch.tensor(prompt), torch.arange(len(prompt)), causal(decoder))

    with torch.inference_mode():
        for logits in on_ranks(size, act):
            assert (logits - expected).abs().max() < 1e-4


@pytest.mark.slow
def test_a_worker_of_two_processes(checkpoint, tmp_path):
    """The other rank is told which adapters a step has."""
    folder, model = checkpoint("llama")
    adapters = two_adapters(tmp_path, model)
    models = {-1: model} | {number: merged(model, adapter) for number, adapter in enumerate(adapters)}
    runner = load(folder, *adapters, max_lora_rank=32, tensor_parallel_size=2)
    try:
        engine, asked = Engine(runner, chunk=40), prompts(6, 20, 60)
        sampling, numbers = Sampling(max_tokens=8, temperature=0.0, ignore_eos=True), [n % 3 - 1 for n in range(6)]
        pairs = list(zip(asked, numbers, strict=True))
        ids = [engine.add(prompt, sampling, namespace=str(number), adapter=number) for prompt, number in pairs]
        engine.finish()
        for id, (prompt, number) in zip(ids, pairs, strict=True):
            assert engine.tokens(id) == greedy(models[number], prompt, 8)
    finally:
        runner.close()


def causal(decoder: Decoder):
    """Attention without pages, of one sequence."""

    def attend(_, heads):
        q, k, v = (x.transpose(0, 1)[None] for x in heads.split())
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out[0].transpose(0, 1)

    return attend


# ---------------------------------------------------------------- the reference


@given(st.data())
def test_each_row_gets_its_adapters_part(data):
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    count, depth, rank = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 8)), data.draw(st.integers(1, 5))
    numbers = data.draw(st.lists(st.integers(-1, count - 1), max_size=20))
    a = torch.randn(count, len(sizes) * rank, depth, dtype=torch.float64)
    stack = Stack(a, torch.randn(count, sum(sizes), rank, dtype=torch.float64), tuple(sizes))
    x, out = torch.randn(len(numbers), depth, dtype=torch.float64), torch.randn(len(numbers), sum(sizes)).double()
    expected = out.clone()
    for row, adapter in enumerate(numbers):
        if adapter >= 0:
            inner = (stack.a[adapter] @ x[row]).split(rank)
            parts = zip(stack.b[adapter].split(sizes), inner, strict=True)
            expected[row] += 0.5 * torch.cat([b @ part for b, part in parts])
    rows = Rows()
    rows.use(torch.tensor(numbers, dtype=torch.int32))
    add_by_adapter(x, stack, rows, out, 0.5, batch_invariant=False)
    torch.testing.assert_close(out, expected)


def bases(n: int, k: int) -> list[Product]:
    """The same shape in the model's dtype, in FP8, in INT4."""
    ops, weight = TorchOps(), torch.randn(n, k)
    packed = Int4.of(torch.randint(0, 16, (n, k)), torch.rand(n, k // 32), None, torch.float16)
    return [
        Linear(weight, torch.randn(n)),
        Fp8Linear(Fp8Weight.of(weight), None, torch.float32, ops),
        Int4Linear(packed, None, False, ops),
    ]


@pytest.mark.parametrize("number", range(3), ids=["plain", "fp8", "int4"])
def test_what_adapters_add_is_beside_the_base(number):
    """Whatever its weights are in, and however its result is asked for."""
    torch.manual_seed(number)
    base, x, rows = bases(48, 64)[number], torch.randn(5, 64), Rows()
    stack = Stack(torch.randn(2, 32, 64), torch.randn(2, 48, 16), (32, 16))
    product = LoraLinear(base, stack, rows, TorchOps(), batch_invariant=False)
    assert product.fp8_scaling is None and torch.equal(product(x), base(x)), "no row has an adapter"
    rows.use(torch.tensor([0, -1, 1, 1, -1], dtype=torch.int32))
    delta = torch.zeros(5, 48)
    add_by_adapter(x, stack, rows, delta, 1.0, batch_invariant=False)
    torch.testing.assert_close(product(x), base(x) + delta)
    out, residual = torch.empty(5, 48), torch.ones(5, 48)
    product.put(x, out)
    product.add(x, residual, 0.5)
    torch.testing.assert_close(out, base(x) + delta)
    torch.testing.assert_close(residual, 1 + 0.5 * (base(x) + delta))
    assert torch.equal(out[[1, 4]], base(x)[[1, 4]])


@pytest.mark.parametrize("number", range(3), ids=["plain", "fp8", "int4"])
def test_the_kind_of_a_models_weights_is_that_of_the_bases(checkpoint, number):
    model = decoder_of(checkpoint("llama")[0])
    last = model._layers[-1]
    stack = Stack(torch.zeros(1, 32, 64), torch.zeros(1, 48, 16), (24, 24))
    product = LoraLinear(bases(48, 64)[number], stack, Rows(), TorchOps(), batch_invariant=False)
    model._layers[-1] = replace(last, mlp=replace(last.mlp, gate_up=product))
    assert (model.is_fp8, model.is_int4) == (number == 1, number == 2)


def test_a_product_with_its_gate_is_one_only_without_adapters():
    class Gated(TorchOps):
        @staticmethod
        def gated_linear(x, weight, activation):
            return TorchOps.gate(x @ weight.t(), activation)

    x, rows = torch.randn(3, 64), Rows()
    stack = Stack(torch.randn(1, 32, 64), torch.randn(1, 48, 16), (24, 24))
    base = Linear(torch.randn(48, 64), None, False, Gated())
    product = LoraLinear(base, stack, rows, TorchOps(), batch_invariant=False)
    assert torch.equal(product.gated_linear(x, "silu"), base.gated_linear(x, "silu"))
    rows.use(torch.tensor([-1, 0, -1], dtype=torch.int32))
    assert product.gated_linear(x, "silu") is None


def test_layers_that_only_read_others_add_adapters_to_the_tokens_that_are_wanted(checkpoint, tmp_path):
    """The last layers of Gemma 4, which are computed for these alone: the same logits."""
    folder, model = checkpoint("gemma4_text")
    adapters = [make_adapter(tmp_path / str(n), model, ("q_proj", "o_proj", "up_proj"), seed=n) for n in range(2)]
    decoder = decoder_of(folder, *adapters)
    assert decoder.spec.writers < decoder.spec.num_layers
    tokens, positions, wanted = torch.arange(1, 40), torch.arange(39), torch.tensor([3, 17, 38])
    numbers = torch.tensor([n % 3 - 1 for n in range(39)], dtype=torch.int32)
    attend = reading(decoder, wanted)
    with torch.inference_mode():
        decoder.use_adapters(numbers)
        expected = decoder.forward(tokens, positions, attend, wanted)
        decoder.use_adapters(numbers)
        found = decoder.finish(*decoder.attend_all(tokens, positions, attend, wanted=wanted), tokens=tokens[wanted])
        plain = decoder_of(folder).forward(tokens, positions, attend, wanted)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert (found - plain).abs().max() > 0.01


def decoder_of(folder: Path, *adapters: Path) -> Decoder:
    weights = SafetensorsWeights(folder, torch.float32, torch.device("cpu"), progress=False)
    read = [read_adapter(LoraModule(path.name, str(path)), 16) for path in adapters]
    return Decoder(read_spec(read_json(folder / "config.json")), weights, adapters=read)


def reading(decoder: Decoder, wanted: torch.Tensor):
    """As `causal`, of a model whose last layers read K and V of others; with queries of all tokens, or of the `wanted`
    ones."""
    stored = {}

    def attend(number, heads):
        q, k, v = heads.split()
        source = decoder.spec.layers[number].source
        if source is None:
            stored[number] = k, v
        k, v = stored[number if source is None else source]
        seen = torch.ones(len(k), len(k), dtype=torch.bool).tril()
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        mask = seen[wanted] if q.shape[2] == len(wanted) else seen
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return out[0].transpose(0, 1)

    return attend


def test_results_do_not_depend_on_the_batch(checkpoint, tmp_path):
    folder, model = checkpoint("llama")
    adapters = two_adapters(tmp_path, model)
    asked = prompts(9, 20, 60)

    def answers(together: bool):
        engine = Engine(load(folder, *adapters, max_lora_rank=32, deterministic=True))
        sampling = Sampling(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=1)
        ids = []
        for number, prompt in enumerate(asked):
            adapter = number % 3 - 1
            ids.append(engine.add(prompt, sampling, namespace=str(adapter), adapter=adapter))
            if not together:
                engine.finish()
        engine.finish()
        return [[p.logprob for output in engine.outputs[id] for p in output.logprobs or ()] for id in ids]

    assert answers(together=True) == answers(together=False)
