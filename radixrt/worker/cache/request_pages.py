"""The pages of running requests, as rows of the page table, and their recurrent states.

    a running request's row of the page table

        [ in the tree, held by its lease | private: partial last page, generated tokens ]
          0 ........... lease.length       .............. pages of the row * page_size

Prompt pages enter the tree when the step that fills them is planned, so that another request with the same prompt
shares them in that very step. Pages of generated tokens enter it when their request leaves.

With linear attention a request also has a recurrent state, and goes on from a checkpoint of it (see
`recurrent_states`): then `computed` is the token up to which its state is, and may be less than what its lease holds.
"""

from __future__ import annotations

import numpy as np

from radixrt.tree import Lease
from radixrt.worker.cache.prefix_cache import PrefixCache, int32
from radixrt.worker.cache.recurrent_states import NO_PATH, AnyStates
from radixrt.worker.cache.tier import Tier
from radixrt.worker.plan import STATE_TOKENS
from radixrt.worker.request import Request


class RequestPages:
    """Pages for at most `rows` running requests of `max_model_len` tokens.

    `table` is the page table, int32[rows, max pages of a request]; others may read it."""

    def __init__(self, prefixes: PrefixCache, states: AnyStates, tier: Tier, rows: int, max_model_len: int) -> None:
        self.page_size = prefixes.page_size
        self.table = np.zeros((rows, -(-max_model_len // self.page_size)), dtype=np.int32)
        self._held = np.zeros(rows, dtype=np.int64)
        """How many pages each row has."""
        self._prefixes = prefixes
        self._states = states
        self._tier = tier
        self._rows = list(range(rows - 1, -1, -1))
        self._running: dict[int, Request] = {}
        self._writes: list[tuple[np.ndarray, np.ndarray] | tuple[int, range]] = []
        """(row or rows, indices in them) of the table's entries that have changed since `drain_writes`."""
        self._indices = np.arange(self.table.shape[1], dtype=np.int32)
        self._before_admit = 0
        """Length of `_writes` before the last `admit`."""

    @property
    def has_row(self) -> bool:
        """Whether there is a row for another request and, if it needs one, room for its state."""
        return bool(self._rows) and self._states.has_room

    @property
    def private_pages(self) -> int:
        """Pages of running requests that are not in the tree."""
        return sum(int(self._held[row]) - _lease(r).length // self.page_size for row, r in self._running.items())

    def of(self, row: int) -> np.ndarray:
        """The pages of a row, int32."""
        return self.table[row, : int(self._held[row])]

    def missing(self, request: Request) -> int:
        """How many pages a running request lacks for its tokens so far."""
        return -(-request.total // self.page_size) - int(self._held[request.row])

    def hit(self, request: Request) -> int:
        """Tokens of a waiting request that the tree or the tier below holds and that need not be computed."""
        return self._prefixes.find(request.namespace, request.tokens, request.reusable)[1]

    # ------------------------------------------------------------ requests come

    def admit(self, request: Request) -> None:
        """Give a waiting request a row, and lease what the tree holds of its tokens. `has_row` must be true."""
        self._before_admit = len(self._writes)
        request.row = self._rows.pop()
        lease = request.lease = self._prefixes.lease(request.namespace, request.tokens, request.priority)
        self._running[request.row] = request
        pages = int32(lease.values())
        self._fill(request.row, 0, pages)
        request.resume_at(self._states.covered(pages, min(lease.length, request.reusable)))
        if not self._states.free:
            self._hold_state(request)
        request.state = self._states.begin(self._page_of(request, request.computed))

    def _hold_state(self, request: Request) -> None:
        """Keep the checkpoint in the tier below that a request may go on from: what its live state displaces goes
        there."""
        _, state = self._deepest_below(request)
        if state:
            self._tier.hold_state(state)

    def _deepest_below(self, request: Request) -> tuple[int, int]:
        """(tokens, slot) of the deepest checkpoint in the tier below that the pages there lead to; (0, 0): none."""
        reach = self._tier.reach(request.namespace, request.tokens, _lease(request).length)
        return self._tier.deepest_state(request.namespace, request.tokens, min(request.reusable, reach))

    def withdraw(self, request: Request) -> None:
        """Undo the last `admit`, except that the request's path now counts as recently used."""
        self._leave(request, state_kept=True, withdrawn=True)
        del self._writes[self._before_admit :]

    def catch_up(self, request: Request) -> None:
        """Extend a request's lease by what others have computed of its path since."""
        lease = _lease(request)
        start = lease.length
        with request.path(start) as rest:
            gained = lease.extend_match(rest)
        if gained:
            first = start // self.page_size
            pages = int32(lease.values(start))
            displaced = self.table[request.row, first : min(int(self._held[request.row]), first + len(pages))]
            self._prefixes.free(displaced)
            self._fill(request.row, first, pages)
        most = min(lease.length, request.reusable)
        covered = self._states.covered(self.table[request.row], most)
        if covered > request.computed:
            request.resume_at(covered)
            self._states.restore(request.state, self._page_of(request, covered))

    def onload(self, request: Request) -> int:
        """Copy back, before the step being planned, what the tier below holds of a running request's path beyond its
        lease: with recurrent states, the deepest checkpoint there, if it saves some tokens, and pages up to that.
        Returns the pages of how many tokens take as long. Raises OutOfPages if there are not enough pages."""
        start, size = _lease(request).length, self.page_size
        if request.computed > start:
            return 0
        most, state = request.reusable, 0
        if self._states.total:
            most, state = self._deepest_below(request)
            if most <= request.computed:
                return 0
            self._tier.hold_state(state)
        with request.path(0, most) as path:
            slots = self._tier.hold(request.namespace, path, start)
        stop = start + len(slots) * size
        if stop > start:
            self.reserve(request, stop)
            self._tier.onload(slots, self.table[request.row, start // size : stop // size])
            self.publish(request, stop)
        if state:
            self._states.onload(request.state, state)
            request.resume_at(most)
        elif stop > start:
            request.resume_at(stop)
        return stop - start + (STATE_TOKENS if state else 0)

    def save(self, request: Request, tokens: int, within: int = 0) -> None:
        """Take a checkpoint of the state of a request after its first `tokens` tokens, which the step being planned
        computes and which are in the tree: the last ones of the step, or the first `within`. Nothing happens if there
        is no slot for it."""
        with request.path(0, tokens) as ids:
            self._states.save(request.state, self._page_of(request, tokens), within, (request.namespace, ids))

    def _page_of(self, request: Request, tokens: int) -> int:
        """The page whose checkpoint is that of a request's first `tokens` tokens; 0 if there can be none: they end
        within a page, or are not in the tree."""
        if tokens % self.page_size or not 0 < tokens <= _lease(request).length:
            return 0
        return int(self.table[request.row, tokens // self.page_size - 1])

    # ------------------------------------------------------------ their pages

    def reserve(self, request: Request, tokens: int) -> None:
        """Ensure that a running request has pages for its first `tokens` tokens, evicting if needed. Raises OutOfPages
        if there are not enough."""
        held = int(self._held[request.row])
        missing = -(-tokens // self.page_size) - held
        if missing > 0:
            self._fill(request.row, held, self._prefixes.allocate(missing))

    def reserve_up_to(self, rows: np.ndarray, positions: np.ndarray) -> None:
        """As `reserve_next`, where a row may lack several pages."""
        held, index = self._held[rows], positions // self.page_size
        missing = np.maximum(index + 1 - held, 0)
        if not missing.any():
            return
        pages = self._prefixes.allocate(int(missing.sum()))
        where = np.flatnonzero(missing)
        parts = np.split(pages, np.cumsum(missing[where])[:-1])
        for row, first, part in zip(rows[where].tolist(), held[where].tolist(), parts, strict=True):
            self._fill(row, first, part)

    def reserve_next(self, rows: np.ndarray, positions: np.ndarray) -> None:
        """Ensure that each row has a page for the token at its position; both are int64[N]. Raises OutOfPages if there
        are not enough, and then allocates none."""
        index = positions if self.page_size == 1 else positions // self.page_size
        held = self._held[rows]
        lacking = held <= index
        count = int(np.count_nonzero(lacking))
        if not count:
            return
        pages = self._prefixes.allocate(count)
        if count < len(rows):
            rows, index, held = rows[lacking], index[lacking], held[lacking]
        self.table[rows, index] = pages
        self._held[rows] = held + 1
        self._writes.append((rows, index))

    def slots(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """int32 slots of `positions` in `rows`; all three arrays have the same shape."""
        if self.page_size == 1:
            return self.table[rows, positions]
        page, offset = np.divmod(positions, self.page_size)
        return self.table[rows, page] * self.page_size + offset.astype(np.int32)

    def row_slots(self, row: int, start: int, stop: int) -> np.ndarray:
        """int32 slots of positions [start, stop) of one row."""
        if self.page_size == 1:
            return self.table[row, start:stop].copy()
        positions = np.arange(start, stop)
        return self.slots(np.full(len(positions), row), positions)

    def accept(self, request: Request, drafted: int) -> None:
        """Let a request go on from the state after so many of its drafted tokens."""
        request.state = self._states.accept(request.state, drafted)

    def publish(self, request: Request, tokens: int) -> None:
        """Insert the full pages of the first `tokens` tokens into the tree. Their KV may still have to be computed by
        the step being planned."""
        lease = _lease(request)
        start, stop = lease.length, tokens - tokens % self.page_size
        if stop <= start:
            return
        first = start // self.page_size
        pages = self.table[request.row, first : stop // self.page_size]
        with request.path(start, stop) as path:
            others = self._prefixes.publish(lease, path, pages)
        self._fill(request.row, first, others)

    def _fill(self, row: int, first: int, pages: np.ndarray) -> None:
        if not len(pages):
            return
        stop = first + len(pages)
        self.table[row, first:stop] = pages
        self._held[row] = max(int(self._held[row]), stop)
        before, places = self._writes[-1] if self._writes else (None, None)
        if isinstance(places, range) and before == row and places.stop == first:
            self._writes[-1] = row, range(places.start, stop)  # merging saves the overhead of an item in drain_writes
        else:
            self._writes.append((row, range(first, stop)))

    def drain_writes(self) -> np.ndarray:
        """The table's entries that have changed since the last call, int32[3, N]: row, index in the row, page."""
        writes, self._writes = self._writes, []
        packed = np.empty((3, sum(len(index) for _, index in writes)), dtype=np.int32)
        begin = 0
        for row, index in writes:
            rows, indices, pages = packed[:, begin : begin + len(index)]
            rows[:] = row
            if isinstance(index, range):
                indices[:] = self._indices[index.start : index.stop]
                pages[:] = self.table[row, index.start : index.stop]
            else:
                indices[:] = index
                pages[:] = self.table[row, index]
            begin += len(index)
        return packed

    # ------------------------------------------------------------ requests leave

    def retire(self, request: Request, keep: bool = False) -> None:
        """Take a request off its row. The KV of its known tokens stays in the tree, and `retained` takes over its lease
        if `keep`. Its state becomes a checkpoint, except that of a text that was only scored."""
        self.publish(request, min(request.computed, len(request.tokens)))
        scored = request.score_from is not None and request.computed == request.total
        noted = request.tokens[: _lease(request).length]
        self._leave(request, keep, state_kept=not scored)
        self._tier.note(request.namespace, memoryview(noted))

    def discard(self, request: Request, keep: int) -> None:
        """Take a request off its row, and remove its path beyond `keep` tokens from the tree, as `forget` does."""
        length = _lease(request).length
        self._leave(request)
        if length > keep:
            self.forget(request, length, keep)

    def forget(self, request: Request, length: int, keep: int = 0) -> None:
        """Remove a request's tokens [keep, length) (see `PrefixCache.forget`)."""
        self._prefixes.forget(request.namespace, request.tokens[:length], keep)

    def _leave(self, request: Request, keep: bool = False, state_kept: bool = False, withdrawn: bool = False) -> None:
        row, lease = request.row, _lease(request)
        page = self._page_of(request, request.computed) if state_kept else 0
        with request.path(0, request.computed) as ids:
            self._states.end(request.state, page, (request.namespace, ids) if page else NO_PATH)
        request.state = 0
        self._prefixes.free(self.table[row, lease.length // self.page_size : int(self._held[row])])
        if keep:
            self._prefixes.retained.keep(request, lease)
        elif withdrawn:
            lease.withdraw()
        else:
            lease.release()
        request.lease = None
        request.resume_at(0)
        request.row = -1
        self._held[row] = 0
        del self._running[row]
        self._rows.append(row)

    # ------------------------------------------------------------ invariants

    def check(self, tree_pages: np.ndarray) -> list[np.ndarray]:
        """Assert that rows agree with their leases, and states with their requests, given the tree's pages. Returns the
        private pages of each row."""
        private = []
        for row, request in self._running.items():
            lease = _lease(request)
            shared = lease.length // self.page_size
            assert self._held[row] >= shared, "a row holds what its lease pins"
            assert np.array_equal(self.table[row, :shared], int32(lease.values())), "a row shows its lease"
            private.append(self.table[row, shared : int(self._held[row])])
        self._states.check([request.state for request in self._running.values()], tree_pages)
        return private


def _lease(request: Request) -> Lease:
    """The lease of a running request."""
    assert request.lease is not None
    return request.lease
