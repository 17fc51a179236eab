"""The GPU's runner, in Triton's interpreter where there is no GPU, against the plain one."""

from __future__ import annotations

import re
from functools import partial

import msgspec
import numpy as np
import pytest
import torch
from torch.nn import functional as F

from radixrt.config import WorkerConfig, resolve
from radixrt.messages import Grammar, Sampling
from radixrt.worker.cuda import ops
from radixrt.worker.cuda.attention import kernel_checks, segments
from radixrt.worker.cuda.attention.chunk_plan import FlashInferOrTriton
from radixrt.worker.cuda.attention.chunks import Sequences
from radixrt.worker.cuda.attention.variants import Shape, Variant
from radixrt.worker.cuda.elementwise.staging import Packer
from radixrt.worker.cuda.graphs.decode_graphs import graph_sizes
from radixrt.worker.cuda.latent.full_chunks import FullHeads, FullStep
from radixrt.worker.cuda.runner import CudaRunner
from radixrt.worker.execution.host_pool import HostPool
from radixrt.worker.execution.prefix_sharing import Cost
from radixrt.worker.load import options
from radixrt.worker.load import runner as loading
from radixrt.worker.model.layers.layers import DecoderLayer
from radixrt.worker.plan import Moves
from radixrt.worker.structured.compile import Grammars
from radixrt.worker.structured.matcher import Matcher
from radixrt.worker.structured.vocabulary import Vocabulary
from tests.interpreter import slow_without_gpu
from tests.worker.cuda.ragged import PlainFlashInfer
from tests.worker.engine import Engine, prompts
from tests.worker.families import GEMMA_4_MOE, make_model
from tests.worker.test_drafting import Told

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # exp overflows to infinity, as it should

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16}
LINEAR |= {"linear_value_head_dim": 16}
MAMBA = {"num_hidden_layers": 3, "mamba_n_heads": 4, "mamba_d_state": 16}
INDEXED = {"num_key_value_heads": 4, "moe_intermediate_size": 24, "index_topk": 36, "index_n_heads": 16}
INDEXED |= {"index_head_dim": 12, "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "v_head_dim": 12}
INDEXED |= {"qk_rope_head_dim": 8, "n_routed_experts": 8, "num_experts_per_tok": 3, "first_k_dense_replace": 1}
LAST_LINEAR = ["linear_attention", "full_attention", "linear_attention"]


@pytest.fixture(
    scope="module",
    params=[
        "llama",
        pytest.param("qwen3", marks=pytest.mark.slow),
        pytest.param("mistral", marks=pytest.mark.slow),
        pytest.param("qwen3_moe", marks=pytest.mark.slow),
        "gpt_oss",
        "deepseek_v3",
        pytest.param("deepseek_v32", marks=pytest.mark.slow),
        pytest.param("glm_moe_dsa", marks=pytest.mark.slow),
        pytest.param("qwen3_next", marks=slow_without_gpu),
        pytest.param("qwen3_5_text", marks=pytest.mark.slow),
        pytest.param("olmo_hybrid", marks=pytest.mark.slow),
        pytest.param("kimi_linear", marks=pytest.mark.slow),
        pytest.param("lfm2", marks=pytest.mark.slow),
        pytest.param("nemotron_h", marks=pytest.mark.slow),
        pytest.param("granitemoehybrid", marks=pytest.mark.slow),
        pytest.param("bamba", marks=pytest.mark.slow),
        pytest.param("falcon_h1", marks=pytest.mark.slow),
        pytest.param("deepseek_v2", marks=pytest.mark.slow),
        pytest.param("glm4_moe", marks=pytest.mark.slow),
        pytest.param("minimax_m2", marks=pytest.mark.slow),
        pytest.param("gemma3_text", marks=pytest.mark.slow),
        pytest.param("phi3", marks=pytest.mark.slow),
        pytest.param("smollm3", marks=pytest.mark.slow),
        pytest.param("olmo3", marks=pytest.mark.slow),
        pytest.param("granite", marks=pytest.mark.slow),
        pytest.param("ministral3", marks=pytest.mark.slow),
        pytest.param("mistral4", marks=pytest.mark.slow),
        pytest.param("glm4", marks=pytest.mark.slow),
        pytest.param("glm4_moe_lite", marks=pytest.mark.slow),
        pytest.param("exaone4", marks=pytest.mark.slow),
        pytest.param("granite_swa", marks=pytest.mark.slow),
        pytest.param("afmoe", marks=pytest.mark.slow),
        pytest.param("cohere2_moe", marks=pytest.mark.slow),
        pytest.param("laguna", marks=pytest.mark.slow),
        pytest.param("apertus", marks=pytest.mark.slow),
        pytest.param("youtu", marks=pytest.mark.slow),
        pytest.param("gemma2", marks=pytest.mark.slow),
        pytest.param("llama4_text", marks=pytest.mark.slow),
        pytest.param("cohere", marks=pytest.mark.slow),
        pytest.param("phimoe", marks=pytest.mark.slow),
        pytest.param("gemma4_text", marks=pytest.mark.slow),
        pytest.param("gemma4_text+moe", marks=pytest.mark.slow),
        pytest.param("mimo_v2_flash", marks=pytest.mark.slow),
    ],
)
def folder(request, tmp_path_factory):
    changes = {
        "mistral": {"sliding_window": 16},
        "gpt_oss": {"sliding_window": 16},
        "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
        "deepseek_v2": {"num_key_value_heads": 4, "attention_bias": True, "moe_intermediate_size": 24},
        "deepseek_v3": {"num_key_value_heads": 4, "moe_intermediate_size": 24},
        "deepseek_v32": INDEXED,
        "glm_moe_dsa": INDEXED | {"num_hidden_layers": 3, "index_topk_pattern": "FSF"},
        "glm4_moe": {"moe_intermediate_size": 24},
        "minimax_m2": {"rotary_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
        "cohere2_moe": {"expert_selection_fn": "sigmoid", "norm_topk_prob": False, "num_shared_experts": 1},
        "qwen3_next": LINEAR | {"num_hidden_layers": 3, "layer_types": [*["linear_attention"] * 2, "full_attention"]},
        "qwen3_5_text": LINEAR | {"num_hidden_layers": 3, "layer_types": LAST_LINEAR},
        "youtu": {"num_key_value_heads": 4, "head_dim": 8},
        "olmo_hybrid": {"num_hidden_layers": 3, "linear_key_head_dim": 12, "linear_value_head_dim": 24},
        "kimi_linear": {"num_hidden_layers": 3, "num_key_value_heads": 4, "moe_intermediate_size": 24},
        "lfm2": {"num_hidden_layers": 3},
        "nemotron_h": {"num_hidden_layers": 8, "ssm_state_size": 16, "moe_intermediate_size": 24},
        "granitemoehybrid": MAMBA,
        "bamba": MAMBA,
        "falcon_h1": MAMBA | {"mamba_d_ssm": 64, "mamba_rms_norm": True},
        "llama4_text": {"no_rope_layers": [1, 0], "interleave_moe_layer_step": 1},
        "cohere": {"use_qk_norm": True, "head_dim": 8},
        "mistral4": {"num_key_value_heads": 4, "moe_intermediate_size": 24, "head_dim": 24},
        "glm4_moe_lite": {"num_key_value_heads": 4, "moe_intermediate_size": 24, "head_dim": 8},
        "gemma4_text": {"num_hidden_layers": 4, "vocab_size_per_layer_input": 128},
        "gemma4_text+moe": GEMMA_4_MOE | {"num_hidden_layers": 4},
        "mimo_v2_flash": {"num_hidden_layers": 3, "head_dim": 24, "moe_intermediate_size": 24},
    }
    path = tmp_path_factory.mktemp(request.param)
    make_model(path, request.param.partition("+")[0], **SIZES | changes.get(request.param, {}))
    return path


def runners(
    folder, page_size: int = 1, tokens: int = 1200, exact: bool = False, ragged: bool = False, full: bool = False,
    states: int = 0,
):  # fmt: skip
    """(plain, of the GPU) on the same weights, in float32; `ragged`: with something in FlashInfer's place; `full`: with
    full heads, of which the workspace holds some; `states`: so many recurrent states."""
    sizes = {"max_total_tokens": tokens, "page_size": page_size, "max_mamba_cache_size": states}
    config = resolve(WorkerConfig(model=str(folder), device="cpu", **sizes))
    loaded = options.look_up(config)
    plain = loading.make_runner(config, loaded)
    model = loading.load_model(config, loaded, exact, ops=ops)
    pool = loading.make_pool(loaded, tokens // page_size + 1, page_size)
    kinds = torch.float32, torch.device("cpu")
    shape = Shape.of(loaded.spec, page_size)
    return plain, CudaRunner(
        model, pool, page_size, rows=8, eos_ids=loaded.eos_ids, num_sms=4, exact=exact,
        states=loading.make_states(config, loaded),
        flashinfer=PlainFlashInfer(shape, torch.float32, 300) if ragged else None,
        full=FullHeads(loaded.spec, page_size, *kinds, 256, Variant(64, 32, 4, 2), 8, 1 << 16) if full else None,
    )  # fmt: skip


@pytest.mark.parametrize(("family", "window"), [("llama", None), ("mistral", 16), ("gpt_oss", 16)])
def test_what_the_kernel_for_hopper_is_for(family, window, tmp_path, monkeypatch):
    """Shared prefixes of decodes, which no window hides, and chunks in layers that have none; nothing where results are
    exact."""
    make_model(tmp_path, family, **SIZES, **({"sliding_window": window} if window else {}))
    special = Variant(128, 128, 4, 2, specialised=True)
    monkeypatch.setattr(kernel_checks, "find_specialised", lambda *_: special)
    _, fast = runners(tmp_path)
    kind, places = fast._kinds.all[0], np.arange(1)
    assert kind.compiled.many is special and not kind.compiled.few.specialised
    chunks = kind.chunks
    sequences = Sequences(places, places, places + 9, places)
    step = chunks._over_pages(sequences, chunks._windows, Packer(torch.device("cpu")))
    found = {each: variant.specialised for each, variant in step._variants.items()}
    assert found == {each: each is None for each in set(fast._model.spec.windows)}
    _, exact = runners(tmp_path, exact=True)
    kind = exact._kinds.all[0]
    assert not (kind.compiled.many.specialised or kind.chunks._variant.specialised or kind.chunks._plain)


@pytest.mark.parametrize("window", [16, pytest.param(4096, marks=pytest.mark.slow)])
def test_layers_of_two_kinds(window, tmp_path, monkeypatch):
    """With windows in one of them, and with none; the last layer reads K and V of another one."""
    kinds = ["sliding_attention", "full_attention", "full_attention"]
    sizes = {"num_hidden_layers": 3, "layer_types": kinds, "num_kv_shared_layers": 1, "sliding_window": window}
    make_model(tmp_path, "gemma4_text", **SIZES | sizes | {"vocab_size_per_layer_input": 128})
    plain, fast = runners(tmp_path)
    found = [(kind.shape.head_dim, kind.windows) for kind in fast._kinds.all]
    assert found == [(16, {window if window == 16 else None}), (32, {None})]
    sizes, inner = set(), DecoderLayer.finish

    def noted(layer, mixed, *rest):
        sizes.add((layer.place.layer, len(mixed)))
        return inner(layer, mixed, *rest)

    monkeypatch.setattr(DecoderLayer, "finish", noted)
    trunk, greedy = prompts(1, 20, 20, vocab_size=128)[0], Sampling(max_tokens=2, temperature=0.0, ignore_eos=True)
    asked = [trunk + tail for tail in prompts(3, 1, 5, vocab_size=128, seed=1)]
    tokens = [Engine(runner, chunk=23, rows=8, max_model_len=64).generate(asked, greedy) for runner in (plain, fast)]
    assert tokens[1] == tokens[0] and fast.read_keys < fast.plain_keys
    most = [max(size for number, size in sizes if number == layer) for layer in range(3)]
    assert most[0] == most[1] == 23 and 0 < most[2] < 4, "it is computed for few tokens"


class Late(HostPool):
    """What a step does not wait for comes back as late as it may."""

    late: tuple[Moves, ...] = ()

    def arrive(self) -> None:
        for moves in self.late:
            super().move(moves)
        self.late = ()

    def move(self, moves: Moves, wait: bool = True) -> None:
        none = np.zeros((2, 0), np.int32)
        super().move(Moves(moves.offload, none, moves.states_offload, none))
        self.late = (Moves(none, moves.onload, none, moves.states_onload),)
        if wait:
            self.arrive()


@slow_without_gpu
def test_states_come_back_before_they_are_read(tmp_path, monkeypatch):
    """A step in which other requests decode does not wait for them; the device has room for two of three requests."""
    for name, value in (
        ("scheduler.state_checkpoints.MIN_CHECKPOINT_TOKENS", 2),
        ("scheduler.state_checkpoints.TAIL", 2),
        ("scheduler.scheduler.MIN_FETCHED_TOKENS", 1),
    ):
        monkeypatch.setattr(f"radixrt.worker.{name}", value)
    layers = {"num_hidden_layers": 3, "layer_types": [*["linear_attention"] * 2, "full_attention"]}
    make_model(tmp_path, "qwen3_next", **SIZES | LINEAR | layers)
    plain, fast = runners(tmp_path, tokens=60, states=4)
    fast.host = Late(fast.pool, 1, torch.zeros(1 << 20, dtype=torch.uint8), None, fast.states, 20)
    asked, few = prompts(3, 20, 24, vocab_size=128), Sampling(max_tokens=3, temperature=0.0, ignore_eos=True)
    expected = Engine(plain, rows=2, max_model_len=64).generate(asked, few)
    engine = Engine(fast, rows=2, max_model_len=64)
    assert engine.generate(asked, few) == expected
    lengths = 3, 6, 3  # the third one comes while the second one decodes
    ids = [
        engine.add(prompt, msgspec.structs.replace(few, max_tokens=n)) for n, prompt in zip(lengths, asked, strict=True)
    ]
    engine.finish()
    assert [engine.tokens(id)[:3] for id in ids] == expected
    assert [engine.last(id).cached_tokens for id in ids] == [len(prompt) - 2 for prompt in asked]
    assert engine.cache.tier.states.onloaded > 0


DRAFTING = ("gpt_oss", "deepseek_v3", "deepseek_v32", "qwen3_5_text", "olmo_hybrid", "kimi_linear", "lfm2")
DRAFTING += ("nemotron_h", "granitemoehybrid", "qwen3_next", "bamba", "falcon_h1")
PENALIZED = {"temperature": 0.0, "repetition_penalty": 1.2, "frequency_penalty": 0.3}


@pytest.mark.parametrize(
    "folder",
    ["llama", *(pytest.param(x, marks=pytest.mark.slow) for x in DRAFTING)],
    indirect=True,
)
@pytest.mark.parametrize("how", [PENALIZED, pytest.param({"temperature": 1.0}, marks=pytest.mark.slow)], ids=str)
def test_drafts_are_verified(folder, how):
    """Rows of one request side by side, the shared prefix of all read once, steps that overlap."""
    plain, fast = runners(folder)
    shared = prompts(1, 30, 30, vocab_size=128)[0]
    asked = [shared + p for p in prompts(3, 1, 9, vocab_size=128, seed=1)]
    sampling = Sampling(max_tokens=9, seed=3, ignore_eos=True, **how)
    expected = Engine(plain, chunk=64, rows=8).generate(asked, sampling)
    drafter = Told(True, [prompt + tokens for prompt, tokens in zip(asked, expected, strict=True)])
    assert Engine(fast, chunk=64, rows=8, drafter=drafter).generate(asked, sampling) == expected
    assert drafter.accepted > 6 and drafter.drafted > drafter.accepted


def test_it_generates_what_the_plain_one_does(folder):
    """Greedy and drawn, with penalties and log-probabilities, chunked, shared prefixes, overlapped."""
    plain, fast = runners(folder, page_size=8 if folder.name.startswith("qwen") else 1)
    shared = prompts(1, 30, 30, vocab_size=128)[0]
    asked = [shared + p for p in prompts(5, 1, 9, vocab_size=128, seed=1)]
    samplings = [
        Sampling(max_tokens=4, temperature=0.0, ignore_eos=True),
        Sampling(max_tokens=5, temperature=0.0, ignore_eos=True),
        Sampling(max_tokens=3, temperature=1.0, seed=3, top_p=0.9, top_k=20, ignore_eos=True),
        Sampling(max_tokens=3, temperature=0.7, seed=4, min_p=0.05, ignore_eos=True),
        Sampling(max_tokens=3, temperature=0.0, repetition_penalty=1.3, logprobs=2, ignore_eos=True),
    ]
    # Without and with what the host must know first.
    batches = [range(4), range(5)] if folder.name.startswith("llama") else [range(5)]
    found = []
    assert fast.read_keys == 0
    for runner in (plain, fast):
        engine = Engine(runner, chunk=23, rows=8, max_model_len=128)
        for some in batches:
            ids = [engine.add(asked[i], samplings[i]) for i in some]
            engine.finish()
            found.append([engine.tokens(id) for id in ids])
    assert found[len(batches) :] == found[: len(batches)]
    windowed = None not in fast._model.spec.windows
    assert (fast.read_keys < fast.plain_keys) != windowed, "what they share is read once"


@pytest.mark.parametrize("folder", ["llama"], indirect=True)
def test_what_tokens_decide_on_is_sampled_when_they_are_known(folder):
    """Grammars, penalties and log-probabilities in one batch with what needs none of it; steps overlap all the same,
    also that in which a text ends."""
    pytest.importorskip("xgrammar")
    grammar = Grammar("regex", "(ab|cde){1,2}f")
    greedy = Sampling(max_tokens=8, temperature=0.0, ignore_eos=True)
    samplings = [
        msgspec.structs.replace(greedy, grammar=grammar),
        msgspec.structs.replace(greedy, grammar=grammar, temperature=1.0, seed=5),
        msgspec.structs.replace(greedy, repetition_penalty=1.5, frequency_penalty=0.4),
        msgspec.structs.replace(greedy, logprobs=2),
        greedy,
    ]
    asked = prompts(5, 5, 12, vocab_size=128)
    found = []
    for runner in runners(folder):
        grammars = Grammars("", 128, frozenset({2}))
        grammars._vocabulary = Vocabulary([b""] * 3 + [bytes([b]) for b in range(125)], {})
        engine = Engine(runner, rows=8, max_model_len=128)
        ids = [engine.add(prompt, sampling) for prompt, sampling in zip(asked, samplings, strict=True)]
        for id in ids[:2]:
            request = engine.scheduler._requests[id]
            request.stop_ids |= {2}
            request.matcher = Matcher(grammars.get(grammar).result(), request)
        engine.finish()
        found.append([engine.tokens(id) for id in ids])
        reported = [o.logprobs[0] for o in engine.outputs[ids[3]] if o.logprobs]
        found[-1].append([(one.token, [t for t, _ in one.top], round(one.logprob, 3)) for one in reported])
    assert found[1] == found[0] and len(found[0][5]) == 8
    for tokens in found[0][:2]:
        assert re.fullmatch(rb"(ab|cde){1,2}f", bytes(t - 3 for t in tokens if t != 2))


@pytest.mark.parametrize(
    "folder",
    ["llama", pytest.param("gpt_oss", marks=pytest.mark.slow), pytest.param("gemma3_text", marks=pytest.mark.slow)],
    indirect=True,
)
def test_what_is_shared_may_go_to_flashinfer(folder, monkeypatch):
    """Tails and decodes under one shared prefix, long chunks alone: the same tokens as plainly computed."""
    for name, value in (
        ("segments.SHORTEST_PART", 8), ("segments.PART_COST", 2),
        ("decodes.LARGE", 40), ("decodes.SLOWER", 1 << 20),
        ("chunk_plan.FlashInferOrTriton", partial(FlashInferOrTriton, queries=12, shared=1)),
    ):  # fmt: skip
        monkeypatch.setattr(f"radixrt.worker.cuda.attention.{name}", value)
    monkeypatch.setattr(segments, "Cost", lambda key_bytes, partial_bytes, tile: Cost(key_bytes, 1, tile))
    trunk = prompts(1, 30, 30, vocab_size=128)[0]
    asked = [trunk] + [trunk + p for p in prompts(5, 6, 20, vocab_size=128, seed=1)]
    greedy = Sampling(max_tokens=3, temperature=0.0, ignore_eos=True)
    found = []
    for runner in runners(folder, ragged=True):
        engine = Engine(runner, chunk=64, rows=8, max_model_len=128)
        found.append([engine.generate(asked[:1], greedy), engine.generate(asked, greedy)])
    assert found[1] == found[0]
    used = set(runner._kinds.all[0].chunks._flashinfer.used)
    assert segments.SHARED_PREFIXES in used
    if set(runner._model.spec.windows) == {None}:  # chunks share nothing where a layer has a window
        assert {segments.PREFIXES, segments.TAILS} <= used
    assert 0 in used, "the first prompt is a long chunk without a prefix"


class SomeByFullHeads:
    """In the rule's place."""

    def __init__(self, *_) -> None:
        pass

    def long(self, starts, counts):
        return counts >= 8


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["deepseek_v3", "deepseek_v2"], indirect=True)
def test_latent_attention_by_full_heads(folder, monkeypatch):
    """Long chunks so, short ones and decodes of the same step absorbed: the same tokens and scores as plainly computed,
    cold and warm; not where results are exact."""
    monkeypatch.setattr("radixrt.worker.cuda.attention.chunk_plan.FullOrAbsorbed", SomeByFullHeads)
    steps: list[tuple[int, int]] = []
    run = FullStep.run

    def counted(self, q, *rest):
        steps.append((len(q), self.chunks))
        run(self, q, *rest)

    monkeypatch.setattr(FullStep, "run", counted)
    trunk = prompts(1, 40, 40, vocab_size=128)[0]
    asked = [prompt for n in (3, 12) for prompt in prompts(2, n, n, vocab_size=128, seed=n)]
    asked += [trunk, trunk[:30] + asked[2], trunk[:30] + asked[0]]
    greedy = Sampling(max_tokens=6, temperature=0.0, ignore_eos=True)
    found = []
    plain, fast = runners(folder, full=True)
    for runner in (plain, fast):
        engine = Engine(runner, chunk=64, rows=8, max_model_len=128)
        found.append([engine.generate(asked[:3], greedy), engine.generate(asked, greedy)])
        id = engine.add(asked[2] + trunk, greedy, score_from=1)  # the logits of all tokens, in the last layer, too
        engine.finish()
        found[-1].append(engine.tokens(id))
        scores = [s for o in engine.outputs[id] for s in o.scores or []]
        found[-1].append([round(s, 3) for s in scores])
    assert found[1] == found[0]
    assert any(tokens > 64 - 8 for tokens, _ in steps) and len({chunks for _, chunks in steps}) > 1
    steps.clear()
    _, exact = runners(folder, exact=True, full=True)
    Engine(exact, rows=8, max_model_len=128).generate(asked[-2:], greedy)
    assert not steps


@pytest.mark.parametrize(
    "folder",
    [
        "llama",
        pytest.param("qwen3_next", marks=pytest.mark.slow),
        pytest.param("nemotron_h", marks=pytest.mark.slow),
        pytest.param("gpt_oss", marks=pytest.mark.slow),
        pytest.param("mistral", marks=pytest.mark.slow),
        pytest.param("deepseek_v3", marks=pytest.mark.slow),
        pytest.param("deepseek_v32", marks=pytest.mark.slow),
        pytest.param("gemma3_text", marks=pytest.mark.slow),
        pytest.param("gemma4_text", marks=pytest.mark.slow),
        pytest.param("mimo_v2_flash", marks=pytest.mark.slow),
        pytest.param("phimoe", marks=pytest.mark.slow),
    ],
    indirect=True,
)
@pytest.mark.usefixtures("steady_products")
def test_exact_attention_does_not_depend_on_the_batch(folder, monkeypatch):
    """Cold and alone, in one chunk; in a batch, in small chunks; warm: the same logits to the last bit, if products are
    (here by one row at a time). Of partial results there is room for those of a few tiles."""
    monkeypatch.setattr("radixrt.worker.cuda.attention.attention_groups.EXACT_PART", 16)
    monkeypatch.setattr("radixrt.worker.cuda.attention.chunks.HELD_BYTES", 1 << 12)

    def linear(x, w, b=None):
        return (torch.stack([w @ row for row in x]) if len(x) else x @ w.t()) + (0 if b is None else b)

    monkeypatch.setattr(F, "linear", linear)
    asked = prompts(3, 13, 15, vocab_size=128)
    logits: list[torch.Tensor] = []
    tokens = []
    for together, chunk in ((False, 512), (True, 9)):
        plain, runner = runners(folder, exact=True)
        seen: dict[int, list[torch.Tensor]] = {}
        inner = runner._last_tokens.sample_greedy

        def pick(found, ids, rows, at=None, inner=inner, seen=seen):
            for row, one in zip(rows.tolist(), found if at is None else found[at], strict=True):
                seen.setdefault(row, []).append(one.clone())
            return inner(found, ids, rows, at)

        runner._last_tokens.sample_greedy = pick
        sampling = Sampling(max_tokens=5, temperature=0.0, ignore_eos=True)  # over the end of a part
        if together:
            tokens.append(Engine(runner, chunk=chunk, rows=8, max_model_len=128).generate(asked, sampling))
            logits += [torch.stack(seen[row]) for row in sorted(seen)]
        else:
            for prompt in asked:
                Engine(runner, chunk=chunk, rows=8, max_model_len=128).generate([prompt], sampling)
            logits += torch.stack(seen[0]).split(5)
    alone, batched = logits[:3], logits[3:]
    assert len(batched) == 3
    for one in alone:
        assert any(torch.equal(one, other) for other in batched)
    assert tokens[0] == Engine(plain, chunk=512, rows=8, max_model_len=128).generate(asked, sampling)


def test_scores_and_a_failed_request(folder):
    plain, fast = runners(folder)
    prompt = prompts(1, 20, 20, vocab_size=128)[0]
    scores = []
    for runner in (plain, fast):
        engine = Engine(runner, max_model_len=128, rows=8)
        id = engine.add(prompt, Sampling(max_tokens=0, temperature=0.0), score_from=12)
        engine.finish()
        scores.append([s for o in engine.outputs[id] for s in o.scores or []])
    assert torch.allclose(torch.tensor(scores[0]), torch.tensor(scores[1]), atol=1e-4) and len(scores[0]) == 8
    fast._model._embedding.weight[7] = torch.nan
    engine = Engine(fast, max_model_len=128, rows=8)
    bad, good = engine.add([3, 7, 9]), engine.add([5, 4, 9], Sampling(max_tokens=3, temperature=0.0, ignore_eos=True))
    engine.finish()
    assert engine.last(bad).finish == "error" and "not finite" in engine.last(bad).error
    assert engine.last(good).finish == "length" and len(engine.tokens(good)) == 3


def test_graph_sizes():
    assert graph_sizes(0) == []
    assert graph_sizes(1) == [1]
    assert graph_sizes(20) == [1, 2, 4, 8, 16, 20]
    for most in (7, 64, 256, 300, 512):
        sizes = graph_sizes(most)
        assert sizes == sorted(set(sizes)) and sizes[-1] == most
