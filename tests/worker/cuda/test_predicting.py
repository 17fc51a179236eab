"""Proposals of the GPU's runner, in Triton's interpreter, against those of the plain one and the reference. Where there
is a GPU, only the kernels are tested here; the runner is in tests/gpu."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from radixrt.config import WorkerConfig, resolve
from radixrt.messages import Sampling
from radixrt.worker.cuda import ops
from radixrt.worker.cuda.attention.work import FIELDS
from radixrt.worker.cuda.elementwise.staging import Packer
from radixrt.worker.cuda.runner import CudaRunner
from radixrt.worker.cuda.sampling.mtp import PackedRequests, _accept_kernel, _place_kernel
from radixrt.worker.load import options, runner
from radixrt.worker.plan import Draft, Plan
from tests.worker.cuda.test_runner import LINEAR, SIZES
from tests.worker.engine import Engine, prompts
from tests.worker.families import make_model
from tests.worker.multi_token import add_layer
from tests.worker.test_predictor import COUNT, Always

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # exp overflows to infinity, as it should

CHANGES = {
    "deepseek_v3": {"num_key_value_heads": 4, "moe_intermediate_size": 24, "head_dim": 8},
    "glm4_moe": {"moe_intermediate_size": 24},
    "qwen3_next": LINEAR | {"num_hidden_layers": 3, "mlp_only_layers": [], "layer_types": ["linear_attention"] * 2},
}
CHANGES["qwen3_next"]["layer_types"] = [*CHANGES["qwen3_next"]["layer_types"], "full_attention"]


SLOW = [name if name == "glm4_moe" else pytest.param(name, marks=pytest.mark.slow) for name in CHANGES]


@pytest.fixture(scope="module", params=SLOW)
def made(request, tmp_path_factory):
    """(folder, reference)"""
    if torch.cuda.is_available():
        pytest.skip("of a runner in Triton's interpreter, which is off if there is a GPU")
    path = tmp_path_factory.mktemp(request.param)
    model = make_model(path / "plain", request.param, **SIZES | CHANGES[request.param])
    return path / "model", add_layer(path / "plain", model, path / "model")


def runners(folder, page_size: int = 1, tokens: int = 600, kv: str = "auto"):
    config = WorkerConfig(
        str(folder), device="cpu", max_total_tokens=tokens, page_size=page_size, speculative_algorithm="mtp",
        kv_cache_dtype=kv,
    )  # fmt: skip
    config = resolve(config)
    loaded = options.look_up(config)
    model, states = runner.load_model(config, loaded, ops=ops), runner.make_states(config, loaded)
    pool = runner.make_pool(loaded, tokens // page_size + 1, page_size)
    pool.scales = runner.load_scales(config, loaded, model)
    fast = CudaRunner(model, pool, page_size, rows=6, eos_ids=loaded.eos_ids, num_sms=4, states=states)
    return runner.make_runner(config, loaded), fast


@pytest.mark.parametrize("page_size", [pytest.param(1, marks=pytest.mark.slow), 8])
def test_proposals_are_the_reference_s(made, page_size):
    """In one chunk and several, after drafts of which some are right, with steps that overlap. The text is the same."""
    folder, reference = made
    plain, fast = runners(folder, page_size)
    asked = prompts(2, 12, 24, vocab_size=128)
    sampling = Sampling(max_tokens=7, temperature=0.0, ignore_eos=True)
    expected = Engine(plain, chunk=16, rows=6).generate(asked, sampling)
    drafter = Always(fast)
    assert Engine(fast, chunk=16, rows=6, drafter=drafter).generate(asked, sampling) == expected
    assert drafter.drafted > 3
    for tokens, ids in drafter.took:
        assert ids == reference.propose(tokens, COUNT)[: len(ids)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [
        {"temperature": 1.0},
        pytest.param({"temperature": 0.0, "repetition_penalty": 1.2, "logprobs": 1}, marks=pytest.mark.slow),
    ],
)
def test_sampled_and_penalized(made, how):
    """Tokens that are sampled at launch, and those that wait for the tokens before them."""
    folder, reference = made
    plain, fast = runners(folder)
    asked = prompts(2, 12, 16, vocab_size=128)
    sampling = Sampling(max_tokens=6, seed=3, ignore_eos=True, **how)
    expected = Engine(plain, chunk=64, rows=6).generate(asked, sampling)
    drafter = Always(fast)
    engine = Engine(fast, chunk=64, rows=6, drafter=drafter)
    for _ in range(2):
        assert engine.generate(asked, sampling) == expected
    assert drafter.drafted > 3
    for tokens, ids in drafter.took[: len(drafter.took) // 3]:
        assert ids == reference.propose(tokens, COUNT)[: len(ids)]


def test_which_drafted_tokens_were_right_is_found_on_the_device(device):
    """Drafts, a chunk and decodes, padded to more."""
    requests = tuple(range(4))
    entries = (requests[0], *[requests[1]] * 4, *[requests[2]] * 3, requests[3])
    counts = np.array([1] * 8 + [5], dtype=np.int32)
    starts = np.array([9, 20, 21, 22, 23, 40, 41, 42, 3], dtype=np.int32)
    tokens = np.array([-1, 5, 6, 7, 8, 50, 51, 52, 1, 1, 1, 1, 1], dtype=np.int32)
    drafts = Draft([6, 7, 8], 1), Draft([51, 52], 5)
    ones, none = np.ones(9, dtype=np.int32), np.zeros((3, 0), dtype=np.int32)
    proposes = np.array([2, 3, 0, 0, 0, 0, 0, 0, 1], dtype=np.int32)
    plan = Plan(
        1, entries, np.array([3, 1, 1, 1, 1, 0, 0, 0, 2], np.int32), starts, counts, tokens, tokens * 0, ones,
        ones > 0, none, drafts, proposes=proposes,
    )  # fmt: skip
    for said, accepted in (([6, 7, 9, 4], 2), ([6, 7, 8, 4], 3), ([9, 7, 8, 4], 0)):
        sampled = np.array([77, *said, 51, 52, 60, 88], dtype=np.int32)
        packer = Packer(device)
        packed = PackedRequests.pack(packer, plan, [1, 2, 8], padding=5)
        sent = packer.send()
        assert packed.indices == [0, 1, 8] and packed.counts == [2, 3, 1] and packed.size == 8 and packed.passes == 3
        at, index, drafted, position, row, count = (
            x.of(sent) for x in (packed.at, packed.index, packed.drafted, packed.position, packed.row, packed.count)
        )
        last, where, chosen = (torch.empty_like(at) for _ in range(3))
        ids, drawn = (torch.from_numpy(x).to(device) for x in (tokens, sampled))
        _accept_kernel[(8,)](ids, drawn, at, index, drafted, position, last, where, chosen)
        assert row.tolist() == [3, 1, 2, 0, 5, 5, 5, 5] and count.tolist() == [2, 3, 1, 0, 0, 0, 0, 0]
        assert last[:4].tolist() == [77, said[accepted], 88, 60]
        assert where[:4].tolist() == [10, 21 + accepted, 8, 43]
        assert chosen[:4].tolist() == [0, 1 + accepted, 12, 7]
    integers = np.arange(100, dtype=np.int32)
    assert packed.proposals(integers) == {0: [76, 84], 1: [77, 85, 93], 8: [78]}


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("parts", [1, 3, 8])
def test_where_a_pass_writes_and_reads(device, page, parts):
    positions, counts = [0, 5, 37, 70, 9], [1, 2, 1, 3, 0]
    table = np.random.default_rng(0).permutation(120).reshape(6, 20).astype(np.int32)
    if page == 1:
        table = np.random.default_rng(0).permutation(600).reshape(6, 100).astype(np.int32)
    row, position, count = (
        torch.tensor(x, dtype=torch.int32, device=device) for x in ([4, 1, 0, 2, 3], positions, counts)
    )
    slots, items = torch.zeros_like(row), torch.zeros((5 * parts, FIELDS), dtype=torch.int32, device=device)
    there = torch.from_numpy(table).to(device)
    _place_kernel[(5,)](row, position, count, there, slots, items, there.stride(0), page, parts, 8, 16, FIELDS)
    for r, at in enumerate(positions):
        own = items[r * parts : (r + 1) * parts].tolist()
        if not counts[r]:
            assert slots[r] == 0 and all(item[3] == item[4] for item in own)
            continue
        assert slots[r] == table[row[r], at // page] * page + at % page
        assert sorted(key for item in own for key in range(item[3], item[4])) == list(range(at + 1))
        for part, (query, queries, its_row, begin, end, its_position, partial, direct) in enumerate(own):
            assert (query, queries, its_row, its_position) == (r, 1, row[r], at)
            assert partial == r * parts + part and not direct and (begin % 16 == 0 or begin == end)
