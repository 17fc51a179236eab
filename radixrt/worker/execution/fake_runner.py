"""A runner without a model: tokens by a formula, step times by configured rates. The whole stack runs on it in
milliseconds.

With `check` it records for every KV slot a hash of the prefix that was written there, and asserts at each step that a
request would attend to its own prefix: this finds any error in page accounting. With `num_states` it does the same for
recurrent states. What the tokens of requests are it asks `histories`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from radixrt.checkpoint.lora_modules import LoraModule, check_files
from radixrt.messages import TokenLogprob
from radixrt.messages.ranks import RequestInfo
from radixrt.worker.cache.disk_figures import Disk
from radixrt.worker.cache.host_disk import HostDisk
from radixrt.worker.disk import DiskStore
from radixrt.worker.plan import (
    FROM_DEVICE,
    NOT_SAMPLED,
    STATE_TOKENS,
    Histories,
    Moves,
    Plan,
    Result,
    SampleInputs,
    StateWork,
)
from radixrt.worker.stuck import Stuck

EOS = 2
_FIRST_TOKEN = 3
_MIX = np.uint64(0x9E3779B97F4A7C15)


def fake_token(last: int, position: int, vocab_size: int) -> int:
    """The token that follows `last` at `position`: never one of the special ids 0 to 2."""
    return _FIRST_TOKEN + (last * 1103515245 + position * 12345 + 7) % (vocab_size - _FIRST_TOKEN)


def fake_logprob(token: int) -> float:
    """The natural log-probability that FakeRunner reports for a token."""
    return -1.0 - (token % 97) / 97


def prefix_hashes(tokens: np.ndarray) -> np.ndarray:
    """uint64 for each position: a hash of all tokens up to it."""
    powers = np.cumprod(np.full(len(tokens), _MIX, dtype=np.uint64))
    return np.cumsum((tokens.astype(np.uint64) + np.uint64(1)) * powers)


class FakeRunner:
    """A Runner whose steps take `decode_step` seconds, plus `decode_each` seconds for each decode, plus the time of
    chunks at `prefill_rate`, and of pages that come back from host memory at `fetch_rate` tokens per second (0: no
    time)."""

    sparse = shares = False
    page_bytes = 0

    def __init__(
        self,
        num_pages: int = 4096,
        page_size: int = 1,
        vocab_size: int = 32_000,
        max_model_len: int = 1 << 20,
        prefill_rate: float = 0.0,
        decode_step: float = 0.0,
        decode_each: float = 0.0,
        check: bool = False,
        overlaps: bool = False,
        num_states: int = 0,
        truth: int = 0,
        num_host_pages: int = 0,
        fetch_rate: float = 0.0,
        num_host_states: int = 0,
        store: Callable[[], DiskStore] | None = None,
    ) -> None:
        """`store`: opens what keeps the pages of host memory, with `check`.
        `truth`: it proposes tokens, of which one in so many is wrong (1: all); 0: it proposes none."""
        self.predicts = truth > 0
        self._truth = truth
        self.num_pages = num_pages
        self.num_states = num_states
        self.num_host_pages = num_host_pages
        self.num_host_states = num_host_states
        self.page_size = page_size
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.eos_ids = frozenset({EOS})
        self.prefill_rate = prefill_rate
        self.fetch_rate = fetch_rate
        self.decode_step = decode_step
        self.decode_each = decode_each
        self.overlaps = overlaps
        self.plain_keys = self.read_keys = 0
        self.busy_seconds = 0.0
        self.computed_tokens = 0
        """Tokens computed since start."""
        self.steps: list[tuple[int, int]] = []
        """(requests, tokens) of each step, while `check` is on."""
        self._check = check
        self._hashes = np.zeros(num_pages * page_size if check else 0, dtype=np.uint64)
        """With `check`: the prefix hash of each slot."""
        self._host = np.zeros((num_host_pages if check else 0, page_size), dtype=np.uint64)
        """With `check`: those of the pages in host memory."""
        self._states = np.zeros(num_states if check else 0, dtype=np.uint64)
        """With `check`: the hash of the prefix that each slot has the state of; 0: of no token."""
        self._host_states = np.zeros(num_host_states if check else 0, dtype=np.uint64)
        """With `check`: those of the states in host memory."""
        self._applied = 0
        """The last step whose copies are made."""
        self.disk: Disk | None = None
        if store is not None:
            if not check:
                raise ValueError("store: only a fake runner that checks has pages")
            states = self._host_states[1:, None].view(np.uint8) if num_host_states else None
            self.disk = HostDisk(store(), self._host.view(np.uint8), states, self._settled)
        self._sampled: dict[int, int] = {}
        """The last sampled token of each row of the page table."""
        self._inputs: dict[int, SampleInputs] = {}
        """By number of the step."""
        self._step = 0
        """The last launched one."""
        self.histories: Histories | None = None
        """Without them nothing is checked."""
        self._free_at = 0.0

    def bind(self, table: np.ndarray) -> None:
        self._table = table

    def audit(self, histories: Histories) -> None:
        self.histories = histories

    def launch(self, plan: Plan) -> Callable[[], Result]:
        self.computed_tokens += len(plan.tokens)
        self._step = plan.step
        seconds = self._seconds(plan)
        self.busy_seconds += seconds
        self._free_at = max(self._free_at, time.monotonic()) + seconds
        done_at = self._free_at
        if self._check and self.histories is not None:
            self.steps.append((len(plan.requests), len(plan.tokens)))
            # As on a device, the slots that a step reads and writes are fixed at launch, and steps run in order.
            read = self._read_slots(plan)
            self._check_proposals(plan, read)
            return lambda: self._wait(plan, done_at, read)
        return lambda: self._wait(plan, done_at, None)

    def move(self, moves: Moves) -> None:
        if self._check:
            self._copy(moves)

    def _settled(self) -> Callable[[], bool]:
        """Copies are made when the result of their step is read."""
        step = self._step
        return lambda: self._applied >= step

    def mask_room(self, count: int) -> np.ndarray:
        return np.empty((count, -(-self.vocab_size // 32)), dtype=np.int32)

    def sample_deferred(self, inputs: SampleInputs) -> None:
        """Tokens are computed when the result is read."""
        self._inputs[self._step] = inputs

    def read_adapter(self, module: LoraModule) -> None:
        check_files(module.name, Path(module.path))

    def put_adapter(self, slot: int, module: LoraModule, adapter: None) -> None:
        """Nothing to do: tokens do not depend on adapters."""

    def works(self) -> bool:
        return True

    def kill(self) -> None:
        """There are no other ranks."""

    def close(self) -> None:
        if self.disk is not None:
            self.disk.close()

    def _seconds(self, plan: Plan) -> float:
        fetched = 0.0
        if plan.moves is not None and self.fetch_rate:
            tokens = plan.moves.onload.shape[1] * self.page_size + plan.moves.states_onload.shape[1] * STATE_TOKENS
            fetched = tokens / self.fetch_rate
        if not self.prefill_rate and not self.decode_each:
            return fetched + self.decode_step
        decodes = int((plan.counts == 1).sum())
        chunks = (len(plan.tokens) - decodes) / self.prefill_rate if self.prefill_rate else 0.0
        return fetched + chunks + self.decode_step + decodes * self.decode_each

    def _wait(self, plan: Plan, done_at: float, read: list[np.ndarray] | None) -> Result:
        inputs = self._inputs.pop(plan.step, None)
        if plan.needs_host_tokens and inputs is None:
            raise RuntimeError(NOT_SAMPLED)
        if (rest := done_at - time.monotonic()) > 0:
            time.sleep(rest)
        last, positions = plan.tokens, plan.starts
        if len(plan.tokens) > len(plan.requests):
            last, positions = last[np.cumsum(plan.counts) - 1], positions + plan.counts - 1
        last, positions = last.astype(np.int64), positions.astype(np.int64)
        if self.overlaps:
            rows = plan.rows.tolist()
            for b in np.flatnonzero(last == FROM_DEVICE):
                last[b] = self._sampled[rows[b]]
        if read is not None:
            self._check_step(plan, last, read)
        sampled = _FIRST_TOKEN + (last * 1103515245 + positions * 12345 + 7) % (self.vocab_size - _FIRST_TOKEN)
        tokens = sampled.tolist()
        stuck = {} if inputs is None else self._follow_grammars(plan, inputs, tokens)
        if self.overlaps:
            self._sampled.update(zip(rows, tokens, strict=True))
        result = Result(tokens) if inputs is None else self._result(plan, tokens, stuck)
        return result if plan.proposes is None else replace(result, proposals=self._propose(plan, tokens, stuck))

    def _propose(self, plan: Plan, tokens: list[int], stuck: dict[int, Stuck]) -> dict[int, list[int]]:
        """The formula's next tokens, some of them wrong. (Those of a grammar differ.)"""
        proposals, drafts = {}, {draft.first: draft for draft in plan.drafts}
        assert plan.proposes is not None
        for index in np.flatnonzero(plan.proposes).tolist():
            last = index + drafts[index].accepted(tokens) if index in drafts else index
            position, token, ids = int(plan.starts[last] + plan.counts[last]), tokens[last], []
            for at in range(position, position + int(plan.proposes[index])):
                token = fake_token(token, at, self.vocab_size)
                ids.append(token if (token + at) % self._truth else EOS + 1)
            if index not in stuck:
                proposals[index] = ids
        return proposals

    def _follow_grammars(self, plan: Plan, inputs: SampleInputs, tokens: list[int]) -> dict[int, Stuck]:
        """Replace tokens by ones that the grammars allow, stop ids first. Returns, by index, why a request is stuck."""
        for b, mask in zip(inputs.masked, inputs.masks, strict=True):
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[: self.vocab_size])
            ends = [i for i in allowed.tolist() if i in plan.requests[b].stop_ids]
            tokens[b] = ends[0] if ends else int(allowed[tokens[b] % len(allowed)])
        return inputs.stuck

    def _result(self, plan: Plan, tokens: list[int], stuck: dict[int, Stuck]) -> Result:
        logprobs: list[TokenLogprob | None] = []
        if any(r.sampling.logprobs is not None for r in plan.requests):
            logprobs = [self._logprob(r, token) for r, token in zip(plan.requests, tokens, strict=True)]
        scores = {b: self._score(plan.requests[b], known) for b, known in plan.following.items()}
        return Result(tokens, logprobs, scores, stuck=stuck)

    def _logprob(self, request: RequestInfo, token: int) -> TokenLogprob | None:
        count = request.sampling.logprobs
        if count is None:
            return None
        return TokenLogprob(token, fake_logprob(token), [(token, fake_logprob(token))] * min(count, 1))

    def _score(self, request: RequestInfo, known: list[int]) -> list[float] | list[TokenLogprob]:
        if request.sampling.logprobs is None:
            return [fake_logprob(t) for t in known]
        return [one for t in known if (one := self._logprob(request, t)) is not None]

    # ------------------------------------------------------------ check

    def _read_slots(self, plan: Plan) -> list[np.ndarray]:
        """The slots that each request of a step attends to."""
        found = []
        for row, start, count in zip(plan.rows, plan.starts, plan.counts, strict=True):
            page, offset = np.divmod(np.arange(start + count), self.page_size)
            found.append(self._table[row, page] * self.page_size + offset)
        return found

    def _check_proposals(self, plan: Plan, read: list[np.ndarray]) -> None:
        """Assert that all proposals are of use and have pages, which no other request of the step reads."""
        if plan.proposes is None:
            return
        drafts = {draft.first: len(draft.ids) for draft in plan.drafts}
        for index in np.flatnonzero(plan.proposes).tolist():
            row, last = plan.rows[index], index + drafts.get(index, 0)
            first = int(plan.starts[index] + plan.counts[index])
            stop = int(plan.starts[last] + plan.counts[last] + plan.proposes[index])
            assert stop <= plan.requests[index].limit - 2, "all can be drafted, and another token sampled after them"
            page, offset = np.divmod(np.arange(first, stop), self.page_size)
            slots = self._table[row, page] * self.page_size + offset
            assert slots.min() >= self.page_size and len(set(slots.tolist())) == stop - first, "each has a slot"
            for other, theirs in zip(plan.rows, read, strict=True):
                assert other == row or not np.isin(slots, theirs).any(), "no other request reads these slots"

    def _check_step(self, plan: Plan, last: np.ndarray, read: list[np.ndarray]) -> None:
        """Write the hashes of a step, then compare those it reads with the expected ones."""
        self._applied = plan.step
        if plan.moves is not None:
            to = plan.moves.onload[1]
            if not plan.needs_onload:
                used = np.concatenate([plan.slots, *read]) // self.page_size
                assert not np.isin(used, to).any(), "pages that are not waited for are not used"
            self._check_states_moved(plan, plan.moves)
            self._copy(plan.moves)
        expected, end = [], 0
        guessed = {draft.first + i: draft.ids[:i] for draft in plan.drafts for i in range(1, len(draft.ids) + 1)}
        assert self.histories is not None
        known = self.histories(plan)
        finished = [ended for _, ended in known]
        for b, ((tokens, _), start, count) in enumerate(zip(known, plan.starts, plan.counts, strict=True)):
            slots, end = plan.slots[end : end + count], end + count
            history = np.array([*tokens, *guessed.get(b, ()), int(last[b])])[: start + count]
            if not finished[b]:
                history[-1] = last[b]
                computed = plan.tokens[end - count : end]
                assert np.array_equal(computed[computed != FROM_DEVICE], history[start:][computed != FROM_DEVICE])
            expected.append(prefix_hashes(history))
            real = slots >= self.page_size
            self._hashes[slots[real]] = expected[b][start:][real]
        if plan.states is not None:
            self._check_states(plan, plan.states, expected, finished)
        for request, ended, slots, hashes in zip(plan.requests, finished, read, expected, strict=True):
            if not ended:
                assert np.array_equal(self._hashes[slots], hashes), f"request {request.id} would read another's KV"

    def _copy(self, moves: Moves) -> None:
        """Copy pages and states between the device and host memory."""
        pages = self._hashes.reshape(-1, self.page_size)
        (page, slot), (held, to) = moves.offload, moves.onload
        assert len(set(slot.tolist())) == len(slot) and slot.all() and held.all() and to.all()
        assert len(set(to.tolist())) == len(to), "a page is filled once: copies may be done in any order"
        self._host[slot] = pages[page]
        pages[to] = self._host[held]
        (source, slot), (held, to) = moves.states_offload, moves.states_onload
        assert len(set(slot.tolist())) == len(slot) and slot.all() and source.all() and held.all() and to.all()
        self._host_states[slot] = self._states[source]
        self._states[to] = self._host_states[held]

    def _check_states_moved(self, plan: Plan, moves: Moves) -> None:
        """Assert that states come back once, and are not used by a step that does not wait for them."""
        to = moves.states_onload[1]
        if to.size:
            work = plan.states
            assert work is not None, "the model has states"
            assert len(set(to.tolist())) == len(to), "a live state comes back once"
            assert not np.isin(to, work.restores).any(), "and not from anywhere else"
            if not plan.needs_onload:
                used = np.concatenate([work.slots, *work.saves, work.within[0], work.within[2]])
                assert not np.isin(used, to).any(), "states that are not waited for are not used"

    def _check_states(self, plan: Plan, work: StateWork, hashes: list[np.ndarray], finished: list[bool]) -> None:
        """Compare the states that a step goes on from with the expected ones, and do its copies. `hashes`: of the
        tokens of each request up to the end of the step; `finished`: which have ended."""
        states = self._states
        states[0] = 0
        states[work.restores[1]] = states[work.restores[0]]
        assert len(set(work.slots.tolist())) == len(work.slots) and work.slots.all(), "each request has its own state"
        runs = work.runs if work.runs.size else np.ones_like(work.slots)
        previous = np.where(runs > 0, work.slots, np.roll(work.slots, 1))
        for request, ended, slot, source, start, hashed in zip(
            plan.requests, finished, work.slots, previous, plan.starts, hashes, strict=True
        ):
            if not ended:
                before = hashed[start - 1] if start else np.uint64(0)
                assert states[source] == before, f"request {request.id} would go on from another state"
            states[slot] = hashed[-1]
        for live, tokens, slot in work.within.T:
            index = work.slots.tolist().index(live)
            assert 0 < tokens < plan.counts[index]
            states[slot] = hashes[index][plan.starts[index] + tokens - 1]
        states[work.saves[1]] = states[work.saves[0]]
