"""Copies between a GPU and host memory: the kernel, how copies are divided, and what waits for what."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from radixrt.worker.cuda.host import host_pool
from radixrt.worker.cuda.host.host_pool import CudaHostPool, copy_rows
from radixrt.worker.execution.kv_pool import KVPool, StatePool
from radixrt.worker.model.spec.mamba_spec import MambaSpec
from radixrt.worker.plan import Moves
from tests.worker.cuda.streams import Device


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8])
def test_pages_become_rows_and_rows_pages(device, dtype):
    """In several planes, whose number and width are no powers of two; also wider than a program."""
    planes = [
        torch.randint(0, 100, (count, 12, words), dtype=dtype, device=device)
        for count, words in ((6, 9), (1, 1), (3, 1500))
    ]
    pages = torch.tensor([7, 2, 11], dtype=torch.int32, device=device)
    expected = torch.cat([x[:, pages.long()].transpose(0, 1).flatten(1) for x in planes], 1)
    rows = torch.zeros((5, expected.shape[1]), dtype=dtype, device=device)
    copy_rows(planes, rows, pages, out=True)
    assert torch.equal(rows[:3], expected) and not rows[3:].any()
    before = [x.clone() for x in planes]
    to = torch.tensor([1, 5, 3], dtype=torch.int32, device=device)
    copy_rows(planes, rows, to, out=False)
    for x, old in zip(planes, before, strict=True):
        old[:, to.long()] = old[:, pages.long()]
        assert torch.equal(x, old)


def test_slots_that_follow_each_other_are_one_copy():
    slots = np.array([3, 4, 5, 9, 11, 12], dtype=np.int32)
    assert host_pool._runs(slots) == [(3, 0, 3), (9, 3, 1), (11, 4, 2)]


def test_copies_go_in_the_order_of_slots_a_part_at_a_time():
    pairs = np.array([[5, 6, 7, 8, 9], [30, 10, 20, 50, 40]], dtype=np.int32)
    parts = [[x.tolist() for x in part] for part in host_pool._parts(pairs, by=1, most=2)]
    assert parts == [[[6, 7], [10, 20]], [[5, 9], [30, 40]], [[8], [50]]]
    assert host_pool._parts(pairs[:, :0], by=0, most=2) == []


class Both:
    """Pages and states of a device and of host memory, each filled with a number, and what these should be."""

    def __init__(self, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
        cpu = torch.device("cpu")
        spec = MambaSpec(frozenset({0, 1}), 2, 4, 1, 6, 4, conv_bias=False, bias=False, out_bias=False)
        pool, states = KVPool(1, 12, 2, 8, torch.float32, cpu), StatePool(spec, 8, torch.float32, cpu)
        monkeypatch.setattr(host_pool, "PARTS", 2)
        monkeypatch.setattr(host_pool, "STAGING_BYTES", 2 * 2 * pool.nbytes // 12)
        monkeypatch.setattr(host_pool, "copy_rows", lambda *args, out: device.launch(lambda: _copy_rows(*args, out)))
        memory = SimpleNamespace(wait=lambda: torch.zeros(1 << 14, dtype=torch.uint8))
        self.host = CudaHostPool(pool, 1, memory, None, states, 4)
        assert self.host.num_states == 5
        assert min(states.convs[0].nbytes, states.rules[0].nbytes) > self.host._staging[0].nbytes, "they go in pieces"
        self._planes, self._states = pool.planes(1), states
        self.known: dict[tuple[str, int], int] = {}
        """By kind of a place (a page, its slot; a state, its slot) and number: its content."""

    def fill(self, kind: str, at: int, value: int) -> Callable[[], object]:
        """Work of a step that writes a page or a state of the device."""
        self.known[kind, at] = value
        return lambda: [place.fill_(value) for place in self._places(kind, at)]

    def see(self, kind: str, at: int) -> Callable[[], object]:
        """Work of a step that reads a page or a state of the device, which should be as it is known to be now."""
        value = self.known.get((kind, at), 0)

        def look() -> None:
            assert all((place == value).all() for place in self._places(kind, at)), f"{kind} {at}: not {value}"

        return look

    def _places(self, kind: str, at: int) -> list[torch.Tensor]:
        if kind == "page":
            return [x[:, at].view(torch.float32) for x in self._planes]
        return [self._states.convs[at], self._states.rules[at]]


def _copy_rows(planes: list[torch.Tensor], rows: torch.Tensor, pages: torch.Tensor, out: bool) -> None:
    (x,) = planes
    if out:
        rows[: len(pages)] = x[:, pages.long()].transpose(0, 1).flatten(1)
    else:
        x[:, pages.long()] = rows[: len(pages)].unflatten(1, (len(x), -1)).transpose(0, 1)


@pytest.mark.parametrize("seed", range(20))
def test_in_whatever_order_streams_get_on(seed, monkeypatch):
    """Steps find what was to come back, and nothing is overwritten before it was copied or read."""
    rng, device = random.Random(seed), Device(monkeypatch)
    both = Both(device, monkeypatch)
    host, known = both.host, both.known
    for step in range(1, 30):
        pairs, coming = [], set()
        for kind, places, slots in (("page", 12, host.slots), ("state", 8, host.num_states)):
            count = rng.choice([0, 0, 1, 4])
            leaving = list(zip(rng.sample(range(1, places), count), rng.sample(range(1, slots), count), strict=True))
            known |= {(kind + " slot", slot): known.get((kind, at), 0) for at, slot in leaving}
            there = [slot for slot in range(1, slots) if (kind + " slot", slot) in known]
            held = rng.sample(there, min(len(there), rng.choice([0, 0, 1, 3])))
            back = list(zip(held, rng.sample(range(1, places), len(held)), strict=True))
            known |= {(kind, at): known[kind + " slot", slot] for slot, at in back}
            coming |= {(kind, at) for _, at in back}
            pairs += [np.array(x, np.int32).reshape(-1, 2).T for x in (leaving, back)]
        wait = rng.random() < 0.5
        with device:
            host.arrive()
            host.move(Moves(*pairs), wait)
        everything = [("page", at) for at in range(1, 12)] + [("state", at) for at in range(1, 8)]
        free = [place for place in everything if wait or place not in coming]
        for n, place in enumerate(rng.sample(free, 6)):
            device.launch(both.see(*place))
            device.launch(both.fill(*place, 30 * n + step))
        device.run(rng, rng.randint(0, 60))
    with device:
        host.arrive()
    for place in everything:
        device.launch(both.see(*place))
    device.run(rng)
    assert not any(stream.queue for stream in device.streams)
    for (kind, slot), value in known.items():
        if kind.endswith("slot"):
            found = host._host[slot] if kind == "page slot" else host._states[slot - 1]
            assert (found.view(torch.float32) == value).all()
