"""Models on the GPU against transformers in bfloat16; warm against cold."""

from __future__ import annotations

import statistics

import pytest
import torch

from radixrt.config import WorkerConfig, resolve
from radixrt.messages import Sampling
from radixrt.worker.execution.sampler import SamplingMetadata, sample_tokens
from radixrt.worker.load.runner import load_runner
from radixrt.worker.model import read_spec
from radixrt.worker.model.weights.checkpoint import read_json
from radixrt.worker.plan import Runner
from tests.worker.engine import GREEDY, Engine, prompts
from tests.worker.families import GEMMA_4_MOE, YARN_QUERY_SCALING, make_model

SIZES = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "initializer_range": 0.04,
}

LATENT = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
LATENT |= {"head_dim": 64, "num_attention_heads": 16, "num_key_value_heads": 16, "moe_intermediate_size": 256}

FAMILIES = ["llama", "qwen3", "qwen3_moe", "mixtral", "gpt_oss", "deepseek_v2", "deepseek_v3", "glm4_moe"]
BY_TRANSFORMERS = ("gpt_neox", "olmo", "persimmon", "phi", "stablelm")
OTHERS = ["minimax_m2", "phi3", "gemma3_text", "seed_oss", "smollm3", "olmo2", "olmo3", "granite", "ministral3"]
OTHERS += ["mistral4", "glm", "glm4", "glm4_moe_lite", "dots1", "solar_open", "exaone4", "iquestcoder"]
OTHERS += ["qwen2_moe", "olmoe", "flex_olmo", "ernie4_5", "ernie4_5_moe", "hunyuan_v1_dense", "hunyuan_v1_moe", "arcee"]
OTHERS += ["ministral", "granitemoe", "cohere", "cohere2", "cwm", "youtu", "exaone_moe", "hy_v3", "internlm3", "mellum"]
OTHERS += ["sarvam_moe", "sarvam_mla", "granitemoeshared", "granitemoehybrid", "granite_swa", "granitemoe_swa"]
OTHERS += ["llama4_text"]
OTHERS += ["gemma", "gemma2", "nemotron", "starcoder2", *BY_TRANSFORMERS]
OTHERS += ["afmoe", "apertus", "hyperclovax", "laguna", "cohere2_moe", "qwen3_next", "qwen3_5_text"]
OTHERS += ["qwen3_5_moe_text", "olmo_hybrid", "kimi_linear", "lfm2", "lfm2_moe", "deepseek_v32", "glm_moe_dsa"]
OTHERS += ["nemotron_h", "bamba", "falcon_h1", "phimoe", "mimo_v2_flash", "gemma4_text", "gemma4_text+moe"]
"""After a plus sign: another form of the family."""
WINDOWED = ("cwm", "mellum", "afmoe", "laguna", "granite_swa", "granitemoe_swa")
HEADS_256 = ("qwen3_next", "qwen3_5")
WINDOWS = {"sliding_window": 128, "layer_types": [*["sliding_attention"] * 3, "full_attention"]}
OF_FAMILY = dict.fromkeys(("deepseek_v2", "deepseek_v3"), LATENT)
OF_FAMILY |= {"gpt_oss": {"num_attention_heads": 16, "head_dim": 64, "intermediate_size": 512, "sliding_window": 128}}
# A small scale: norms of random weights make scores so large that rounding of q and k shows many times over.
OF_FAMILY |= {"gemma3_text": {"head_dim": 256, "query_pre_attn_scalar": 4096} | WINDOWS, "olmo3": WINDOWS}
OF_FAMILY |= {"glm4_moe_lite": LATENT | {"qk_nope_head_dim": 192, "v_head_dim": 256, "q_lora_rank": 256}}
FARTHER = YARN_QUERY_SCALING | {"original_max_position_embeddings": 128, "llama_4_scaling_beta": 0.1}
OF_FAMILY |= {"ministral3": {"rope_parameters": FARTHER | {"mscale_all_dim": 1.0}}, "exaone4": WINDOWS}
OF_FAMILY |= {
    "mistral4": LATENT | {"kv_lora_rank": 256, "qk_nope_head_dim": 64, "head_dim": 128, "rope_parameters": FARTHER}
}
OF_FAMILY |= dict.fromkeys(("ministral", "cohere2", "cohere2_moe", "cwm", "exaone_moe", "mellum", "afmoe"), WINDOWS)
SWASH = {"layer_rope_theta": [1e4, 1e4, 1e6, 0], "attention_multiplier": 0.088}
OF_FAMILY |= dict.fromkeys(("granite_swa", "granitemoe_swa"), WINDOWS | SWASH)
OF_FAMILY |= {"hyperclovax": {"attention_multiplier": 0.088}}  # of the tests' 0.2, bfloat16 moves logits by 3%
OF_FAMILY |= dict.fromkeys(("youtu", "sarvam_mla"), LATENT)
OF_FAMILY |= {"laguna": WINDOWS | {"num_attention_heads_per_layer": [8, 8, 8, 6]}}
LINEAR = {"head_dim": 256, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "moe_intermediate_size": 256}
OF_FAMILY |= dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), LINEAR)
INDEXED = LATENT | {"q_lora_rank": 256, "index_n_heads": 32, "index_head_dim": 128, "index_topk": 256}
OF_FAMILY |= {"deepseek_v32": INDEXED, "glm_moe_dsa": INDEXED | {"qk_nope_head_dim": 192, "v_head_dim": 256}}
OF_FAMILY |= {"kimi_linear": LATENT | {"linear_num_heads": 4, "linear_head_dim": 128, "num_hidden_layers": 3}}
OF_FAMILY |= dict.fromkeys(("olmo_hybrid", "lfm2", "lfm2_moe"), {"num_hidden_layers": 3})
MAMBA = {"num_hidden_layers": 3, "mamba_n_heads": 16, "mamba_d_head": 64, "mamba_d_state": 128}
OF_FAMILY |= {"bamba": MAMBA, "granitemoehybrid": MAMBA | {"attention_multiplier": 0.088}}
OF_FAMILY |= {"falcon_h1": MAMBA | {"mamba_d_ssm": 1024, "mamba_n_heads": 8, "mamba_d_head": 128, "mamba_d_state": 256}}
NEMOTRON = {"num_hidden_layers": 8, "mamba_num_heads": 16, "mamba_head_dim": 64, "ssm_state_size": 128}
NEMOTRON |= {"moe_intermediate_size": 256, "moe_shared_expert_intermediate_size": 256}
OF_FAMILY |= {"nemotron_h": NEMOTRON}
OF_FAMILY |= {"gemma2": {"head_dim": 256, "query_pre_attn_scalar": 256, "attn_logit_softcapping": 5.0} | WINDOWS}
CHUNKS = {"attention_chunk_size": 128, "no_rope_layers": [1, 1, 1, 0], "num_hidden_layers": 4}
OF_FAMILY |= {"llama4_text": CHUNKS}
MIXED = {"sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 2}
OF_FAMILY |= {"mimo_v2_flash": MIXED | {"head_dim": 192, "v_head_dim": 128, "num_hidden_layers": 4}}
OF_FAMILY["mimo_v2_flash"] |= {"num_attention_heads": 16, "moe_intermediate_size": 256}
GEMMA_4 = MIXED | {"head_dim": 256, "global_head_dim": 512, "num_attention_heads": 8}
OF_FAMILY |= {"gemma4_text": GEMMA_4 | {"hidden_size_per_layer_input": 64, "vocab_size_per_layer_input": 4096}}
OF_FAMILY |= {"gemma4_text+moe": GEMMA_4_MOE | GEMMA_4 | {"moe_intermediate_size": 256}}
OF_FAMILY |= {"minimax_m2": {"rotary_dim": 64}, "smollm3": {"no_rope_layers": [1, 1, 1, 0]}}


@pytest.fixture(scope="module", params=[*FAMILIES, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def made(request, tmp_path_factory):
    """(folder, transformers model on the GPU in bfloat16)."""
    folder = tmp_path_factory.mktemp(request.param)
    name = request.param.partition("+")[0]
    made = make_model(folder, name, **SIZES | OF_FAMILY.get(request.param, {}))
    if name == "gemma4_text":
        soften(made, folder)
    settings = {"attn_implementation": "eager"} if name == "gemma2" else {}  # others leave out its soft caps
    model = type(made).from_pretrained(folder, dtype=torch.bfloat16, **settings)  # rotary frequencies stay float32
    return folder, model.to("cuda").eval()


def soften(model, folder) -> None:
    """Make scores small where there is no softmax scale, as those of the published model are (see OF_FAMILY)."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("k_norm.weight"):
                parameter.div_(64)
    model.save_pretrained(folder)


def load(folder, **settings) -> Runner:
    config = {"model": str(folder), "device": "cuda", "dtype": "bfloat16", "max_total_tokens": 65_536} | settings
    config.setdefault("enforce_eager", True)
    config.setdefault("kv_offloading_size", "1")  # by default, each process would pin a quarter of the host's memory
    if folder.name.removesuffix("0") in BY_TRANSFORMERS:
        config["model_impl"] = "transformers"
    if folder.name.startswith(("gpt_oss", "gemma", "olmo3", "exaone", "ministral0", "cohere2", *HEADS_256, *WINDOWED)):
        config.setdefault("attention_backend", "triton")  # FlashInfer's kernels of their shapes take minutes to build
    return load_runner(resolve(WorkerConfig(**config)))


def last_logits(runner: Runner, prompt: list[int], chunk: int = 8192) -> torch.Tensor:
    engine = Engine(runner, chunk=chunk, max_model_len=4096)
    engine.add(prompt, GREEDY)
    while True:
        plan = engine.scheduler.plan()
        if plan.samples.any():
            return runner.logits(plan)[-1]
        engine.scheduler.apply(plan, runner.launch(plan)())


def median_errors(narrow: Runner, wide: Runner, asked: list[list[int]]) -> tuple[float, float]:
    """The relative error, in norm, of the last logits of `narrow` from those of `wide`, and by how much those of
    `narrow` differ if prompts are computed in other chunks: of each the median of the prompts."""
    errors, apart = [], []
    for prompt in asked:
        found, expected, pieces = (
            last_logits(narrow, prompt),
            last_logits(wide, prompt),
            last_logits(narrow, prompt, 37),
        )
        errors.append(float((found - expected).norm() / expected.norm()))
        apart.append(float((found - pieces).norm() / expected.norm()))
    return statistics.median(errors), statistics.median(apart)


@pytest.mark.parametrize("page_size", [1, 16])
def test_logits_are_those_of_transformers(made, page_size):
    """By the relative error in norm, the median of some prompts: both round to bfloat16, not in the same places, and
    with experts rounding may choose another one. Against float32 this is no farther off than transformers is."""
    folder, model = made
    attention = {"attn_implementation": model.config._attn_implementation}
    wide = type(model).from_pretrained(folder, dtype=torch.float32, **attention).to("cuda").eval()
    errors: dict[str, list[float]] = {"theirs": [], "to float32": [], "theirs to float32": []}
    runner = load(folder, page_size=page_size, kv_cache_dtype="bfloat16")
    for prompt in prompts(9, 50, 900, vocab_size=4096):
        ids = torch.tensor([prompt], device="cuda")
        with torch.inference_mode():
            theirs, exact = (m(ids).logits[0, -1].float() for m in (model, wide))
        found = last_logits(runner, prompt)
        for name, a, b in (
            ("theirs", found, theirs),
            ("to float32", found, exact),
            ("theirs to float32", theirs, exact),
        ):
            errors[name].append(float((a - b).norm() / b.norm()))
    median = {name: sorted(x)[4] for name, x in errors.items()}
    print("relative error of logits:", {name: f"{x:.2e}" for name, x in median.items()})
    if selects(folder):  # 1 to 15%, of theirs, too: it is chance for which prompts rounding selects other tokens
        assert max(median.values()) < 0.2
        return
    bar = 3e-2 if chooses(folder) else 2e-2
    if is_recurrent(folder) or folder.name.startswith("gemma2"):  # two runs differ by as much as each of them is off
        bar = max(bar, 1.25 * median["theirs to float32"])
    assert median["theirs"] < bar
    assert median["to float32"] < (1.25 if chooses(folder) else 1.1) * median["theirs to float32"]


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "fp8_e4m3"])
def test_a_graph_gives_what_its_kernels_give(made, kv_dtype):
    """Prompts and decodes that fill graphs exactly have the shapes of steps without graphs: every token is the same."""
    folder, _ = made
    asked = prompts(15, 20, 150, vocab_size=4096)
    asked += prompts(1, rest := 1920 - sum(map(len, asked)), rest, vocab_size=4096, seed=1)
    settings = {"kv_cache_dtype": kv_dtype, "max_num_seqs": 16}
    eager = Engine(load(folder, **settings), chunk=8192, rows=16).generate(asked)
    graphs = Engine(load(folder, enforce_eager=False, **settings), chunk=8192, rows=16).generate(asked)
    assert graphs == eager


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "fp8_e4m3"])
def test_graphs_between_attentions_give_what_their_kernels_give(made, kv_dtype):
    """Chunks alone and beside a decode, in steps that fill such graphs exactly; of latent attention by full heads."""
    folder, _ = made
    found = []
    for eager in (True, False):
        engine = Engine(load(folder, enforce_eager=eager, kv_cache_dtype=kv_dtype), chunk=512, max_model_len=2048)
        first = engine.add(prompts(1, 512, 512, vocab_size=4096)[0], Sampling(max_tokens=3, temperature=0.0))
        engine.step()
        second = engine.add(prompts(1, 1022, 1022, vocab_size=4096, seed=1)[0], Sampling(max_tokens=1, temperature=0.0))
        engine.finish()
        found.append((engine.tokens(first), engine.tokens(second)))
    assert found[1] == found[0] and len(found[0][0]) == 3


def test_samples_are_those_of_the_reference(made):
    """Drawn tokens of a first step, whose logits are the same, by seed."""
    folder, _ = made
    prompt = prompts(1, 100, 100, vocab_size=4096)[0]
    runner = load(folder)
    logits = last_logits(runner, prompt)
    engine = Engine(load(folder), chunk=8192, rows=64)
    samplings = [Sampling(max_tokens=1, temperature=1.0, seed=s, top_p=0.9, top_k=50, min_p=0.01) for s in range(32)]
    ids = [engine.add(prompt[:-1] + [prompt[-1]], sampling) for sampling in samplings]
    engine.finish()
    found = [engine.tokens(id)[0] for id in ids]
    arrays = SamplingMetadata.arrays(samplings, [len(prompt)] * 32)
    metadata = SamplingMetadata.of({name: torch.from_numpy(x).cuda() for name, x in arrays.items()})
    expected = sample_tokens(logits[None].repeat(32, 1), metadata).tolist()
    same = sum(a == b for a, b in zip(found, expected, strict=True))
    print(f"{same} of 32 draws as the reference")
    assert same >= (16 if is_recurrent(folder) else 28)  # rows of one prompt in a batch round otherwise than alone


@pytest.mark.parametrize(("kv_dtype", "least"), [("bfloat16", 0.15), ("fp8_e4m3", 0.03)])
def test_greedy_agreement_is_reported(made, kv_dtype, least):
    """Both round to 8 bits or fewer, and random weights leave narrow margins: the bar only tells noise from a fault."""
    folder, model = made
    asked = prompts(50, 20, 300, vocab_size=4096)
    found = Engine(load(folder, kv_cache_dtype=kv_dtype), chunk=8192, max_model_len=4096).generate(asked)
    same = total = 0
    for prompt, tokens in zip(asked, found, strict=True):
        ids = torch.tensor([prompt], device="cuda")
        out = model.generate(ids, max_new_tokens=64, do_sample=False, eos_token_id=None, pad_token_id=0)
        expected = out[0, len(prompt) :].tolist()
        first = next((i for i, (a, b) in enumerate(zip(tokens, expected, strict=True)) if a != b), 64)
        same, total = same + first, total + 64
    print(f"{kv_dtype}: greedy tokens before the first that differs: {same / total:.1%}")
    assert same / total > (min(least, 0.05) if is_recurrent(folder) and chooses(folder) else least)


def noise(folder, asked: list[list[int]], **settings) -> float:
    """The most that a logit changes with the shapes of the steps that compute it: chunks that end where tiles do not,
    a last token alone."""
    runner = load(folder, **settings)
    most = worst = 0.0
    for prompt in asked:
        whole = last_logits(runner, prompt)
        for chunk in (77, len(prompt) - 1):
            apart = last_logits(runner, prompt, chunk=chunk) - whole
            most = max(most, float(apart.abs().max()))
            worst = max(worst, float(apart.norm() / whole.norm()))
    print(f"logits move by {most:.3f}, relative {worst:.1e}")
    assert worst < (0.06 if is_recurrent(folder) else 0.03) or chooses(folder)
    return most


def chooses(folder) -> bool:
    """Whether there are experts: where rounding picks another one, logits are others."""
    return read_spec(read_json(folder / "config.json")).experts is not None


def is_recurrent(folder) -> bool:
    return read_spec(read_json(folder / "config.json")).recurrent is not None


def selects(folder) -> bool:
    """Whether tokens are selected that queries attend to: where rounding picks other ones, logits are others."""
    return read_spec(read_json(folder / "config.json")).index is not None


def count_ties(folder, asked, first_run, second_run, bar: float, **settings) -> int:
    """Sequences that part; where they do, the two top logits must be no farther apart than `bar`, but with experts: a
    sample of noise does not foresee where rounding picks another one."""
    ties = clear = 0
    runner = load(folder, **settings)
    for prompt, a, b in zip(asked, first_run, second_run, strict=True):
        first = next((i for i in range(len(a)) if a[i] != b[i]), None)
        if first is not None:
            ties += 1
            top = last_logits(runner, prompt + a[:first]).topk(2).values
            clear += bool(top[0] - top[1] >= bar)
    print(f"{ties} sequences part, {clear} of them where the winner was clear, by {bar:.3f}")
    assert not clear or chooses(folder)
    return ties


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "fp8_e4m3"])
def test_warm_is_cold_where_the_margin_is_not_noise(made, kv_dtype):
    """Tokens alone and cold, in a batch and chunked, and warm; they part at a near tie: the two top logits are within
    what rounding was measured to move both."""
    folder, _ = made
    asked = prompts(24, 100, 600, vocab_size=4096)
    settings = {"kv_cache_dtype": kv_dtype}
    bar = 2 * noise(folder, asked, **settings)
    cold = [Engine(load(folder, **settings), chunk=8192).generate([prompt])[0] for prompt in asked]
    engine = Engine(load(folder, **settings), chunk=512)
    ties = sum(count_ties(folder, asked, cold, engine.generate(asked), bar, **settings) for _ in range(2))
    print(f"{kv_dtype}: {ties} of {2 * len(asked)} sequences part at a near tie (within {bar:.3f})")


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "fp8_e4m3"])
def test_reading_once_what_is_shared_changes_nothing_but_noise(made, kv_dtype):
    """64 requests on one trunk, in graphs: with tree attention and without."""
    folder, _ = made
    if selects(folder):
        pytest.skip("sparse attention shares nothing")
    trunk = prompts(1, 1500, 1500, vocab_size=4096, seed=1)[0]
    asked = [trunk + tail for tail in prompts(64, 20, 90, vocab_size=4096)]
    settings = {"kv_cache_dtype": kv_dtype, "enforce_eager": False, "max_num_seqs": 64}
    found, engines = [], []
    for way in ("off", "auto"):
        engine = Engine(load(folder, tree_attention=way, **settings), chunk=8192, rows=64, max_model_len=2048)
        engine.generate([trunk], Sampling(max_tokens=1, temperature=0.0))
        found.append(engine.generate(asked))
        engines.append(engine)
    off, on = (engine.runner for engine in engines)
    assert off.read_keys == off.plain_keys and on.read_keys < on.plain_keys / 8
    plain = {"kv_cache_dtype": kv_dtype}
    bar = 2 * noise(folder, asked[:8], **plain)
    ties = count_ties(folder, asked, *found, bar, **plain)
    print(f"{kv_dtype}: {ties} of 64 sequences part at a near tie (within {bar:.3f})")


def test_deterministic_is_exact(made):
    folder, _ = made
    asked = prompts(6, 100, 300, vocab_size=4096) + prompts(2, 1000, 1020, vocab_size=4096)  # over the end of a part
    settings = {"deterministic": True, "kv_cache_dtype": "fp8_e4m3"}
    cold = [Engine(load(folder, **settings), chunk=8192, max_model_len=1200).generate([prompt])[0] for prompt in asked]
    for eager in (True, False):
        engine = Engine(load(folder, enforce_eager=eager, **settings), chunk=100, max_model_len=1200)
        assert engine.generate(asked) == cold
        assert engine.generate(asked) == cold
