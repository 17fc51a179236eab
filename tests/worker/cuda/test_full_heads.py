"""Latent attention by full heads against plain torch in the absorbed form; in Triton's interpreter where there is no
GPU."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from radixrt.worker.cuda.attention.chunks import Sequences
from radixrt.worker.cuda.attention.pages import Pages
from radixrt.worker.cuda.attention.variants import Variant
from radixrt.worker.cuda.attention.work import Tiling, make_items, make_merges, sequence_tiles
from radixrt.worker.cuda.elementwise.staging import Packer
from radixrt.worker.cuda.latent import full_heads
from radixrt.worker.cuda.latent.full_chunks import FullHeads, FullStep, _without_direct
from radixrt.worker.cuda.latent.full_heads import ALIGN
from radixrt.worker.execution.attention import TorchAttention
from radixrt.worker.execution.kv_pool import DTYPES, KVPool
from radixrt.worker.model.families.deepseek_v2 import latent_decoder
from radixrt.worker.model.layers.latent import UpProjections
from radixrt.worker.model.layers.linear import HeadLinear
from radixrt.worker.model.spec.spec import ModelSpec
from tests.worker.cuda.test_kernels import error
from tests.worker.pages import make_plan

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # a logarithm of 0 is not used

SEQUENCES = [(0, 1), (40, 70), (0, 130), (200, 9), (128, 128), (3, 2)]
"""(cached, new)."""
VARIANT = Variant(64, 32, 4, 2)
NEAR = 1e-2 if torch.cuda.is_available() else 1e-5
"""A GPU multiplies float32 in TF32."""


def spec_of(heads: int, rank: int, nope: int, rope: int, width: int) -> ModelSpec:
    sizes = {"kv_lora_rank": rank, "qk_nope_head_dim": nope, "qk_rope_head_dim": rope, "v_head_dim": width}
    sizes |= {"q_lora_rank": None, "num_attention_heads": heads, "num_hidden_layers": 1, "max_position_embeddings": 64}
    return latent_decoder(sizes | {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48}, interleaved=False)


@dataclass
class Case:
    """Chunks of sequences on random pages."""

    spec: ModelSpec
    pages: Pages
    sequences: Sequences
    ups: UpProjections
    q: torch.Tensor
    expected: torch.Tensor
    slots: np.ndarray

    @classmethod
    def make(cls, spec: ModelSpec, page_size: int, kv_dtype: str, device: torch.device) -> Case:
        latent = spec.latent
        plan, table = make_plan(np.random.default_rng(0), page_size, SEQUENCES)
        slots = (int(table.max()) + 1) * page_size
        pool = KVPool(1, slots, 1, spec.head_dim, DTYPES[kv_dtype], device, latent.rank)
        if "fp8" in kv_dtype:
            pool.scales = [(2.0, 2.0)]
        k = torch.randn(slots, 1, spec.head_dim, device=device)
        pool.write(0, torch.arange(slots, device=device), k, k[..., : latent.rank])
        tokens, both = len(plan.tokens), latent.nope_dim + latent.rope_dim
        q = torch.randn(tokens, spec.num_heads, both, device=device)
        up = torch.randn(spec.num_heads, latent.nope_dim, latent.rank, device=device) * latent.rank**-0.5
        down = torch.randn(spec.num_heads, latent.value_dim, latent.rank, device=device) * latent.rank**-0.5
        ups = UpProjections(HeadLinear(up.transpose(1, 2)), HeadLinear(down))
        reference = TorchAttention(pool, page_size, (None,), spec.scale)
        reference.bind(table)
        absorbed = torch.cat((ups.k(q[..., : latent.nope_dim]), q[..., latent.nope_dim :]), -1)
        expected = ups.v(reference.begin(plan, device).over_pages(0, absorbed))
        keys, values = (x.flatten(0, 1) for x in pool.pages(0, page_size))
        pages = Pages(keys, values, torch.from_numpy(table).to(device), pool.scales[0], None)
        first = np.cumsum(plan.counts) - plan.counts
        sequences = Sequences(plan.rows, plan.starts, plan.counts, first)
        return cls(spec, pages, sequences, ups, q, expected, plan.slots)

    def run(self, chosen: list[int], full: FullHeads) -> torch.Tensor:
        packer = Packer(self.q.device)
        step = FullStep(self.sequences.take(np.array(chosen)), packer, full)
        step.sent(packer.send())
        out = torch.full_like(self.expected, torch.nan)
        step.run(self.q, self.ups, self.pages, out)
        return out

    def of(self, chosen: list[int]) -> torch.Tensor:
        """bool[T]: the tokens of some sequences."""
        return torch.from_numpy(np.isin(np.repeat(np.arange(len(SEQUENCES)), self.sequences.counts), chosen))


def workspace(spec: ModelSpec, device: torch.device, tokens=4096, programs=8, room=1 << 29, page_size=1) -> FullHeads:
    return FullHeads(spec, page_size, torch.float32, device, tokens, VARIANT, programs, room)


@pytest.mark.parametrize(
    ("kv_dtype", "sizes", "page_size"),
    [
        pytest.param("float32", (4, 32, 16, 8, 16), 1, marks=pytest.mark.slow),
        ("fp8_e4m3", (3, 40, 24, 4, 20), 4),
        pytest.param("fp8_e5m2", (1, 16, 16, 16, 32), 16, marks=pytest.mark.slow),
    ],
)
def test_chunks(sizes, page_size, kv_dtype, device):
    """With parts and without, in groups of sequences and of heads; what is not asked for is not touched."""
    spec = spec_of(*sizes)
    case = Case.make(spec, page_size, kv_dtype, device)
    everything = list(range(len(SEQUENCES)))
    each = 4 * (sizes[2] + sizes[4])
    for chosen, tokens, programs, room in (
        (everything, 4096, 1, 1 << 29),
        (everything, 300, 64, 0),
        ([1, 3, 4], 700, 16, 700 * each * max(1, sizes[0] - 1)),
    ):
        full = workspace(spec, device, tokens, programs, room, page_size=page_size)
        out = case.run(chosen, full)
        mine = case.of(chosen)
        assert error(out[mine], case.expected[mine]) < NEAR
        assert out[~mine].isnan().all()


def test_what_another_sequence_has_is_its_own(device):
    """NaN in its pages does not reach its neighbours in the workspace, nor what was there before."""
    spec = spec_of(2, 32, 16, 8, 16)
    case = Case.make(spec, 1, "float32", device)
    full = workspace(spec, device)
    full._latents.fill_(torch.nan)
    full._keys_values.fill_(torch.nan)
    ill = case.slots[1:71]  # new tokens of the second sequence
    case.pages.keys[torch.from_numpy(ill).long()] = torch.nan
    out = case.run([0, 1, 2, 4], full)
    well = case.of([0, 2, 4])
    assert error(out[well], case.expected[well]) < NEAR
    assert out[case.of([1])].isnan().all()


@pytest.mark.parametrize("page_size", [1, 16])
def test_it_is_tried_out(page_size, device):
    full = workspace(spec_of(3, 40, 24, 4, 20), device, page_size=page_size)
    full.try_out(torch.float8_e4m3fn)
    assert not full._latents[:3].any() and not full._keys_values[: 3 * 128].any()


def test_what_is_written_directly_has_no_partial_result():
    """All others have one place each."""
    lists, first, queries = [], 0, 0
    for origin, cached, new in ((0, 0, 64), (100, 700, 70), (900, 0, 3)):
        one = np.array([origin]), np.array([cached]), np.array([new]), np.array([queries])
        items, _ = make_items(sequence_tiles(*one, None, 64), Tiling(64, 32, 64, 8), first)
        first, queries = first + items.partials, queries + new
        lists.append(items.items)
    merges = make_merges(lists)
    entries, partials = _without_direct(lists, merges.entries)
    assert sorted(entries) == list(range(partials)) and 0 < partials < merges.partials
    items = np.concatenate(lists)
    cut = items[items[:, 7] == 0]
    assert cut[:, 6].tolist() == (np.cumsum(cut[:, 1]) - cut[:, 1]).tolist()


def test_heads_are_computed_in_groups_that_the_workspace_holds(device):
    spec = spec_of(16, 32, 16, 8, 16)
    five = 4 * 32 * 1024 * 5
    for room, tokens, heads in ((1 << 29, 1024, 16), (five, 1024, 4), (five, 512, 8), (0, 1024, 1)):
        full = workspace(spec, device, tokens=1024, room=room)
        assert full.heads_at_once(tokens) == heads
        assert len(full._keys_values) <= max(room // 4, 1024 * 32)


def test_gather(device):
    """Each sequence's keys from a multiple of ALIGN on, zeros after them."""
    spec = spec_of(2, 40, 16, 8, 16)
    case = Case.make(spec, 4, "fp8_e4m3", device)
    counts = [130, 3]
    where = torch.tensor([[2, 130, 0], [4, 3, 2 * ALIGN]], dtype=torch.int32, device=device)
    out = torch.full((3 * ALIGN, 48), torch.nan, device=device)
    full_heads.gather(case.pages, 4, where, 130, out)
    for row, count, begin in zip((2, 4), counts, (0, 2 * ALIGN), strict=True):
        at = torch.arange(count, device=device)
        slots = case.pages.table[row, at // 4].long() * 4 + at % 4
        assert torch.equal(out[begin : begin + count], case.pages.keys[slots, 0].float())
        end = begin + -(-count // ALIGN) * ALIGN
        assert not out[begin + count : end].any()
