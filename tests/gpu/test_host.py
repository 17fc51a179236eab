"""Pages and recurrent states in host memory, on the GPU."""

from __future__ import annotations

import mmap

import numpy as np
import pytest
import torch

from radixrt.worker.cuda.host import host_pool
from radixrt.worker.cuda.host.host_pool import CudaHostPool
from radixrt.worker.cuda.host.pinned import PinnedMemory
from radixrt.worker.execution.kv_pool import DTYPES, KVPool, StatePool
from radixrt.worker.model.spec.mamba_spec import MambaSpec
from radixrt.worker.plan import Moves
from radixrt.worker.scheduler import state_checkpoints
from tests.gpu.test_models import OF_FAMILY, SIZES, load
from tests.worker.engine import Engine, prompts
from tests.worker.families import make_model

DEVICE = torch.device("cuda", 0)


@pytest.mark.parametrize(("page_size", "kv_dtype"), [(1, "fp8_e4m3"), (16, "bfloat16")])
def test_pages_come_back_as_they_were(page_size, kv_dtype, monkeypatch):
    """Through slots in any order, in more parts than staging has, while slots and pages are reused."""
    pool = KVPool(5, 200 * page_size, 2, 96, DTYPES[kv_dtype], DEVICE)
    page = pool.nbytes // 200
    monkeypatch.setattr(host_pool, "STAGING_BYTES", 8 * 7 * page)
    host = CudaHostPool(pool, page_size, PinnedMemory(301 * page, DEVICE))
    planes = pool.planes(page_size)
    rng = np.random.default_rng(0)
    content = {}
    for _ in range(20):
        pages = rng.permutation(np.arange(1, 200, dtype=np.int32))[:100]
        slots = rng.permutation(np.arange(1, 301, dtype=np.int32))[:100]
        for x in planes:
            x[:, torch.from_numpy(pages).long()] = torch.randint(0, 1 << 50, (len(x), 100, x.shape[2]), device=DEVICE)
        saved = [x[:, torch.from_numpy(pages).long()].cpu() for x in planes]
        content |= {int(slot): [x[:, n] for x in saved] for n, slot in enumerate(slots)}
        known = np.array([slot for slot in content], np.int32)
        back = rng.choice(known, min(60, len(known)), replace=False)
        to = rng.permutation(np.arange(1, 200, dtype=np.int32))[: len(back)]
        host.move(Moves(np.stack([pages, slots]), np.stack([back, to])))
        for n, slot in enumerate(back):
            assert all(torch.equal(x[:, to[n]].cpu(), old) for x, old in zip(planes, content[int(slot)], strict=True))


@pytest.mark.parametrize("settings", [{}, {"page_size": 16, "kv_cache_dtype": "bfloat16"}, {"enforce_eager": True}])
def test_what_comes_back_is_what_was_computed(tmp_path, settings):
    """Exact, so that warm is cold: the pool holds a few of the prompts only."""
    make_model(tmp_path, "llama", **SIZES)
    config = {"kv_cache_dtype": "fp8_e4m3", "enforce_eager": False, "deterministic": True} | settings
    runner = load(tmp_path, max_total_tokens=4096, kv_offloading_size="1", **config)
    engine = Engine(runner, chunk=512, rows=16, max_model_len=2048)
    asked = prompts(24, 600, 900, vocab_size=4096)
    cold = engine.generate(asked)
    ids = [engine.add(prompt) for prompt in asked]
    engine.finish()
    assert [engine.tokens(id) for id in ids] == cold
    size = runner.page_size
    assert [engine.last(id).cached_tokens for id in ids] == [(len(p) - 1) // size * size for p in asked]
    assert engine.cache.evicted_tokens == 0 and engine.cache.tier.onloaded_pages * size > 4096


def test_states_come_back_as_they_were(monkeypatch):
    """In pieces of staging, beside pages, while slots are reused and steps that do not wait write other slots."""
    spec = MambaSpec(frozenset(range(3)), 16, 64, 1, 128, 4, conv_bias=False, bias=False, out_bias=False)
    pool, states = KVPool(2, 100, 2, 64, torch.bfloat16, DEVICE), StatePool(spec, 40, torch.bfloat16, DEVICE)
    monkeypatch.setattr(host_pool, "STAGING_BYTES", 8 * states.rules[0].nbytes // 3)
    host = CudaHostPool(pool, 1, PinnedMemory(128 << 20, DEVICE), None, states, 30)
    assert host.num_states == 31
    rng, content, pages = np.random.default_rng(0), {}, np.arange(1, 61, dtype=np.int32)
    for step in range(40):
        host.arrive()
        leaving, slots = (rng.permutation(np.arange(1, n, dtype=np.int32))[:12] for n in (40, 31))
        for slot, at in zip(slots.tolist(), leaving.tolist(), strict=True):
            states.convs[at].normal_()
            states.rules[at].normal_()
            content[slot] = states.convs[at].cpu(), states.rules[at].cpu()
        held = rng.choice(np.array(list(content), np.int32), 8, replace=False)
        to = rng.permutation(np.arange(1, 40, dtype=np.int32))[:8]
        moved = np.stack([pages, pages]), np.zeros((2, 0), np.int32)
        host.move(Moves(*moved, np.stack([leaving, slots]), np.stack([held, to])), wait=step % 2 == 0)
        others = np.setdiff1d(np.arange(1, 40), to)
        states.rules[torch.from_numpy(others).to(DEVICE)] = 7.0
        host.arrive()
        for slot, at in zip(held.tolist(), to.tolist(), strict=True):
            conv, rule = content[slot]
            assert torch.equal(states.convs[at].cpu(), conv) and torch.equal(states.rules[at].cpu(), rule)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("qwen3_next", {}),
        ("qwen3_next", {"enforce_eager": True, "page_size": 16}),
        ("nemotron_h", {"kv_cache_dtype": "bfloat16"}),
        ("lfm2", {}),
    ],
)
def test_conversations_go_on_from_host_memory(tmp_path, family, settings):
    """Exact, so that warm is cold: the pools hold a few of the prompts, and of their states, only."""
    folder = tmp_path / family
    folder.mkdir()
    make_model(folder, family, **SIZES | OF_FAMILY[family])
    config = {"kv_cache_dtype": "fp8_e4m3", "enforce_eager": False, "deterministic": True} | settings
    runner = load(folder, max_total_tokens=4096, max_mamba_cache_size=24, kv_offloading_size="1", **config)
    engine = Engine(runner, chunk=512, rows=16, max_model_len=2048)
    asked = prompts(24, 600, 900, vocab_size=4096)
    cold = engine.generate(asked)
    ids = [engine.add(prompt) for prompt in asked]
    engine.finish()
    assert [engine.tokens(id) for id in ids] == cold
    marks = [len(prompt) - state_checkpoints.TAIL for prompt in asked]
    hits = [engine.last(id).cached_tokens for id in ids]
    assert all(hit >= mark - mark % runner.page_size for hit, mark in zip(hits, marks, strict=True))
    assert engine.cache.tier.states.onloaded > 0 and engine.cache.tier.onloaded_pages * runner.page_size > 4096


def test_memory_can_be_locked_again(monkeypatch):
    """Addresses that were locked are used again, and an error does not stay."""
    for _ in range(3):
        assert PinnedMemory(64 << 20, DEVICE).wait().sum() == 0
    made, make = [], mmap.mmap
    monkeypatch.setattr(mmap, "mmap", lambda *size: made.append(make(*size)) or made[0])
    first = PinnedMemory(1 << 20, DEVICE)
    first.wait()
    with pytest.raises(ValueError, match="cannot be page-locked: CUDA error"):
        PinnedMemory(1 << 20, DEVICE).wait()
    assert torch.ones(2, device="cuda").sum() == 2
