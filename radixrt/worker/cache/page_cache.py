"""The radix tree together with the KV pages: the only place where pages are allocated and freed.

    pages:   free | in the tree (leased, by requests, pins or `kept`, or evictable) | private to a running request

    a running request's row of the page table

        [ in the tree, held by its lease | private: partial last page, generated tokens ]
          0 ........... lease.length       .......................... held[row] * page_size

Prompt pages enter the tree when the step that fills them is planned, so that another request with the same prompt
shares them in that very step. Pages of generated tokens enter it when their request leaves.

With host memory, pages that are evicted go there, and come back when a request needs them (see `host`).

With linear attention a request also has a recurrent state, and goes on from a checkpoint of it (see `states`): then
`computed` is the token up to which its state is, and may be less than what its lease holds. Checkpoints go to host
memory as well (see `host_states`).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from radixrt.tree import Lease, RadixTree
from radixrt.worker.cache.host_recurrent_states import HostRecurrentStatePool
from radixrt.worker.cache.host_tier import HostTier
from radixrt.worker.cache.pins import Pins
from radixrt.worker.cache.recurrent_states import NO_PATH, RecurrentStatePool
from radixrt.worker.cache.retention import RetainedContexts
from radixrt.worker.plan import STATE_TOKENS, StateWork
from radixrt.worker.request import Request

EVICTED = 1 / 256
"""With host memory, at least this share of all pages is evicted at a time: a few large copies are faster than many
small ones."""


KEPT = 0.25
"""With host memory for at least this share of the pages, contexts are not kept for their next turns (see `kept`): to
copy one back takes little time, and its pages admit another request."""


class OutOfPages(Exception):
    """No page is free and none can be evicted, even after pins and retained contexts were released."""


def _int32(raw: bytes) -> np.ndarray:
    return np.frombuffer(raw, dtype=np.int32)


class PageCache:
    """`num_pages` pages of `page_size` token slots for at most `rows` running requests of `max_model_len` tokens.

    `table` is the page table, int32[rows, max pages of a request]. Page 0 is the null page: it is never allocated, and
    what is written there is never read. With `events` tree and states record their changes for the router's index.
    `num_states` slots, of which slot 0 is never allocated, hold recurrent states; 0: the model has none.
    `num_host_pages` slots of host memory, of which slot 0 is not used, hold evicted pages; 0: there are none.
    `num_host_states` likewise for checkpoints of recurrent states: there are both if the model has such states.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        rows: int,
        max_model_len: int,
        events: bool = True,
        max_pinned_share: float = 0.25,
        num_states: int = 0,
        num_host_pages: int = 0,
        num_host_states: int = 0,
    ) -> None:
        if bool(num_host_states) != bool(num_states and num_host_pages):
            raise ValueError("num_host_states: with recurrent states, host memory is for pages and states, or for none")
        self.page_size = page_size
        self.total_pages = num_pages - 1
        self.tree = RadixTree(page_size, events=events)
        host_states = (
            HostRecurrentStatePool(num_host_states, page_size, events, num_states - 1) if num_host_states else None
        )
        self.states = RecurrentStatePool(num_states, num_pages, events, host_states) if num_states else None
        self.host = HostTier(num_host_pages, page_size, events, host_states) if num_host_pages else None
        self._parts = [part for part in (self.states, self.host) if part is not None]
        self.pins = Pins(self.tree, self.total_pages, max_pinned_share, self.states)
        self.retained = RetainedContexts(self.total_pages * page_size)
        self.keeps = num_host_pages - 1 < KEPT * self.total_pages
        """Whether `kept` takes over leases of requests that have ended."""
        self.table = np.zeros((rows, -(-max_model_len // page_size)), dtype=np.int32)
        self.held = np.zeros(rows, dtype=np.int64)
        """How many pages each row has."""
        self._evicted_pages = 0
        self._free = np.arange(num_pages - 1, 0, -1, dtype=np.int32)
        self._num_free = self.total_pages
        self._rows = list(range(rows - 1, -1, -1))
        self._running: dict[int, Request] = {}
        self._writes: list[tuple[np.ndarray, np.ndarray] | tuple[int, range]] = []
        """(row or rows, indices in them) of the table's entries that have changed since `drain_writes`."""
        self._indices = np.arange(self.table.shape[1], dtype=np.int32)
        self._before_admit = 0
        """Length of `_writes` before the last `admit`."""

    # ------------------------------------------------------------ figures

    @property
    def free_pages(self) -> int:
        """Pages that hold nothing."""
        return self._num_free

    @property
    def leased_pages(self) -> int:
        """Pages of running requests, in the tree or private, and pages that pins or `kept` hold."""
        return self.tree.leased_tokens // self.page_size + self._private_pages()

    @property
    def evictable_pages(self) -> int:
        """Pages of the tree that no lease pins."""
        return self.tree.evictable_tokens // self.page_size

    @property
    def has_row(self) -> bool:
        """Whether there is a row for another request and, if it needs one, room for its state."""
        return bool(self._rows) and (self.states is None or self.states.has_room)

    @property
    def version(self) -> int:
        """Changes whenever a hit may be another."""
        return self.tree.version + sum(part.version for part in self._parts)

    @property
    def evicted_tokens(self) -> int:
        """Tokens that were evicted since start, and did not go to host memory or were evicted there as well."""
        return (self._evicted_pages if self.host is None else self.host.lost_pages) * self.page_size

    def held_only_by(self, leases: Sequence[Lease]) -> int:
        """Pages that would become evictable if all these leases were released."""
        return self.tree.held_only_by(leases) // self.page_size

    def _private_pages(self) -> int:
        return sum(int(self.held[row]) - r.lease.length // self.page_size for row, r in self._running.items())

    def hit(self, request: Request) -> int:
        """Tokens of a waiting request that the tree or host memory holds and that need not be computed."""
        return self.found(request.namespace, request.tokens, request.reusable)[1]

    def found(self, namespace: str, tokens: array | np.ndarray, reusable: int) -> tuple[int, int]:
        """How many leading `tokens` have their KV in the tree or in host memory; and how many, at most `reusable`, need
        not be computed: with recurrent states, those up to the deepest checkpoint."""
        match = self.tree.match(namespace, tokens)
        known = match.length if self.host is None else self.host.reach(namespace, tokens, match.length)
        most = min(known, reusable)
        if self.states is None:
            return known, most
        covered = self._covered(_int32(match.values()), most)
        if self.host is not None:
            covered = max(covered, self.host.states.deepest(namespace, tokens, most)[0])
        return known, covered

    def _covered(self, pages: np.ndarray, most: int) -> int:
        """How many tokens, at most `most`, of a path of pages the device's deepest checkpoint of its state covers."""
        return self.states.deepest(pages[: most // self.page_size]) * self.page_size

    # ------------------------------------------------------------ a request's life

    def admit(self, request: Request) -> None:
        """Give a waiting request a row, and lease what the tree holds of its tokens. `has_row` must be true."""
        self._before_admit = len(self._writes)
        request.row = self._rows.pop()
        request.lease = self.tree.lease(self.tree.match(request.namespace, request.tokens))
        self._running[request.row] = request
        pages = _int32(request.lease.values())
        self._fill(request.row, 0, pages)
        request.resume_at(min(request.lease.length, request.reusable))
        if self.states is not None:
            request.resume_at(self._covered(pages, request.computed))
            if self.host is not None and not self.states.free:
                self._hold_state(request)
            request.state = self.states.begin(self._page_of(request, request.computed))

    def _hold_state(self, request: Request) -> None:
        """Keep the checkpoint in host memory that a request may go on from: what its live state displaces goes
        there."""
        start, most = request.lease.length, request.reusable
        _, state = self.host.deepest_state(request.namespace, request.tokens, start, most)
        if state:
            self.host.states.hold(state)

    def withdraw(self, request: Request) -> None:
        """Undo the last `admit`, except that the request's path now counts as recently used."""
        self._leave(request, state_kept=True)
        del self._writes[self._before_admit :]

    def catch_up(self, request: Request) -> None:
        """Extend a request's lease by what others have computed of its path since."""
        start = request.lease.length
        with request.path(start) as rest:
            gained = request.lease.extend_match(rest)
        if not gained:
            return None if self.states is None else self._restore(request, min(start, request.reusable))
        first = start // self.page_size
        pages = _int32(request.lease.values(start))
        own = self.table[request.row, first : min(int(self.held[request.row]), first + len(pages))]
        self._give_back(own)
        self._fill(request.row, first, pages)
        most = min(request.lease.length, request.reusable)
        if self.states is not None:
            return self._restore(request, most)
        request.resume_at(max(request.computed, most))

    def fetch(self, request: Request) -> int:
        """Copy back, before the step being planned, what host memory holds of a running request's path beyond its
        lease: with recurrent states, the deepest checkpoint there, if it saves some tokens, and pages up to that.
        Returns the pages of how many tokens take as long. Raises OutOfPages if there are not enough pages."""
        start, size = request.lease.length, self.page_size
        if self.host is None or request.computed > start:
            return 0
        most, state = request.reusable, 0
        if self.states is not None:
            most, state = self.host.deepest_state(request.namespace, request.tokens, start, most)
            if most <= request.computed:
                return 0
            self.host.states.hold(state)
        with request.path(0, most) as path:
            slots = self.host.hold(request.namespace, path, start)
        stop = start + len(slots) * size
        if stop > start:
            self.reserve(request, stop)
            self.host.fetch(slots, self.table[request.row, start // size : stop // size])
            self.publish(request, stop)
        if state:
            self.states.fetch(request.state, state)
            request.resume_at(most)
        elif stop > start:
            request.resume_at(stop)
        return stop - start + (STATE_TOKENS if state else 0)

    def _restore(self, request: Request, most: int) -> None:
        """Let a running request go on from the deepest checkpoint of its first `most` tokens, if that saves some."""
        covered = self._covered(self.table[request.row, : most // self.page_size], most)
        if covered > request.computed:
            request.resume_at(covered)
            self.states.restore(request.state, self._page_of(request, covered))

    def save(self, request: Request, tokens: int, within: int = 0) -> None:
        """Take a checkpoint of the state of a request after its first `tokens` tokens, which the step being planned
        computes and which are in the tree: the last ones of the step, or the first `within`. Nothing happens if there
        is no slot for it."""
        with request.path(0, tokens) as ids:
            self.states.save(request.state, self._page_of(request, tokens), within, (request.namespace, ids))

    def _page_of(self, request: Request, tokens: int) -> int:
        """The page whose checkpoint is that of a request's first `tokens` tokens; 0 if there can be none: they end
        within a page, or are not in the tree."""
        if tokens % self.page_size or not 0 < tokens <= request.lease.length:
            return 0
        return int(self.table[request.row, tokens // self.page_size - 1])

    def accept(self, request: Request, drafted: int) -> None:
        """Let a request go on from the state after so many of its drafted tokens."""
        request.state = self.states.accept(request.state, drafted)

    def reserve(self, request: Request, tokens: int) -> None:
        """Ensure that a running request has pages for its first `tokens` tokens, evicting if needed. Raises OutOfPages
        if there are not enough."""
        held = int(self.held[request.row])
        missing = -(-tokens // self.page_size) - held
        if missing > 0:
            self._fill(request.row, held, self._take(missing))

    def reserve_up_to(self, rows: np.ndarray, positions: np.ndarray) -> None:
        """As `reserve_next`, where a row may lack several pages."""
        held, index = self.held[rows], positions // self.page_size
        missing = np.maximum(index + 1 - held, 0)
        if not missing.any():
            return
        pages = self._take(int(missing.sum()))
        where = np.flatnonzero(missing)
        parts = np.split(pages, np.cumsum(missing[where])[:-1])
        for row, first, part in zip(rows[where].tolist(), held[where].tolist(), parts, strict=True):
            self._fill(row, first, part)

    def reserve_next(self, rows: np.ndarray, positions: np.ndarray) -> None:
        """Ensure that each row has a page for the token at its position; both are int64[N]. Raises OutOfPages if there
        are not enough, and then allocates none."""
        index = positions if self.page_size == 1 else positions // self.page_size
        held = self.held[rows]
        lacking = held <= index
        count = int(np.count_nonzero(lacking))
        if not count:
            return
        pages = self._take(count)
        if count < len(rows):
            rows, index, held = rows[lacking], index[lacking], held[lacking]
        self.table[rows, index] = pages
        self.held[rows] = held + 1
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

    def publish(self, request: Request, tokens: int) -> None:
        """Insert the full pages of the first `tokens` tokens into the tree. Their KV may still have to be computed by
        the step being planned."""
        start, stop = request.lease.length, tokens - tokens % self.page_size
        if stop <= start:
            return
        pages = self.table[request.row, start // self.page_size : stop // self.page_size]
        with request.path(start, stop) as path:
            present = self.tree.insert(request.lease, path, pages)
        if present:  # another request's pages replace this one's
            self._give_back(pages[: present // self.page_size])
            theirs = _int32(request.lease.values(start, start + present))
            self._fill(request.row, start // self.page_size, theirs)

    def retire(self, request: Request, keep: bool = False) -> None:
        """Take a request off its row. The KV of its known tokens stays in the tree, and `kept` takes over its lease if
        `keep`. Its state becomes a checkpoint, except that of a text that was only scored."""
        self.publish(request, min(request.computed, len(request.tokens)))
        scored = request.score_from is not None and request.computed == request.total
        self._leave(request, keep, state_kept=not scored)

    def discard(self, request: Request, keep: int) -> None:
        """Take a request off its row, and remove its path beyond `keep` tokens from the tree, as `forget` does."""
        length = request.lease.length
        self._leave(request)
        if length > keep:
            self.forget(request, length, keep)

    def forget(self, request: Request, length: int, keep: int = 0) -> None:
        """Remove a request's tokens [keep, length) from the tree, except what running requests lease, and all
        checkpoints there. Pins and retained contexts there are released."""
        path = request.tokens[:length]
        self.pins.release_along(request.namespace, path.tobytes(), keep)
        self.retained.release_along(request.namespace, path.tobytes(), keep)
        if self.states is not None:
            self.states.drop(_int32(self.tree.match(request.namespace, path).values())[keep // self.page_size :])
        if self.host is not None:
            self.host.forget(request.namespace, path, keep)
        self._give_back(_int32(self.tree.forget(request.namespace, path, keep)))

    def _leave(self, request: Request, keep: bool = False, state_kept: bool = False) -> None:
        row = request.row
        if self.states is not None:
            page = self._page_of(request, request.computed) if state_kept else 0
            with request.path(0, request.computed) as ids:
                self.states.end(request.state, page, (request.namespace, ids) if page else NO_PATH)
            request.state = 0
        self._give_back(self.table[row, request.lease.length // self.page_size : int(self.held[row])])
        if keep:
            self.retained.keep(request, request.lease)
        else:
            request.lease.release()
        request.lease = None
        request.resume_at(0)
        request.row = -1
        self.held[row] = 0
        del self._running[row]
        self._rows.append(row)

    def clear(self) -> None:
        """Empty the tree, except for what running requests and pins hold, and host memory."""
        self.retained.clear()
        if self.host is not None:
            self.host.clear()
        self._give_back(_int32(self.tree.evict(self.tree.evictable_tokens)))

    def drop_states(self) -> None:
        """Drop all checkpoints on the device."""
        if self.states is not None:
            self.states.drop_all()

    # ------------------------------------------------------------ events

    def drain_events(self) -> list[tuple]:
        """What has changed since the last call, as events for the router's index: their tags and fields."""
        return self.tree.drain_events() + [event for part in self._parts for event in part.drain_events()]

    def resync_events(self) -> list[tuple]:
        """All that is cached, as events; those that were not drained are dropped."""
        return self.tree.snapshot() + [event for part in self._parts for event in part.resync_events()]

    # ------------------------------------------------------------ pages

    def drain_writes(self) -> np.ndarray:
        """The table's entries that have changed since the last call, int32[3, N]: row, index in the row, page."""
        writes, self._writes = self._writes, []
        found = np.empty((3, sum(len(index) for _, index in writes)), dtype=np.int32)
        begin = 0
        for row, index in writes:
            rows, indices, pages = found[:, begin : begin + len(index)]
            rows[:] = row
            if isinstance(index, range):
                indices[:] = self._indices[index.start : index.stop]
                pages[:] = self.table[row, index.start : index.stop]
            else:
                indices[:] = index
                pages[:] = self.table[row, index]
            begin += len(index)
        return found

    def state_work(self, slots: list[int] | np.ndarray, runs: list[int] | np.ndarray = ()) -> StateWork:
        """What the plan being made does with the states: those of its entries, and copies. See StateWork."""
        return StateWork(np.asarray(slots, np.int32), *self.states.drain(), np.asarray(runs, np.int32))

    def can_take(self, pages: int) -> bool:
        """Whether that many pages are free or can be evicted without releasing pins or retained contexts."""
        return pages <= self._num_free or pages <= self._num_free + self.evictable_pages

    def _take(self, count: int) -> np.ndarray:
        """Allocate `count` pages. The result is a view, valid until pages are given back."""
        if count > self._num_free:
            while not self.can_take(count):
                if not self.retained.release_oldest() and not self.pins.release_oldest():
                    raise OutOfPages
            self._evict((count - self._num_free) * self.page_size)
        self._num_free -= count
        return self._free[self._num_free : self._num_free + count]

    def _evict(self, tokens: int) -> None:
        if self.host is None:
            freed = _int32(self.tree.evict(tokens))
            self._evicted_pages += len(freed)
            return self._give_back(freed)
        gone, left = [], max(tokens, int(EVICTED * self.total_pages) * self.page_size)
        while left > 0 and (found := self.tree.evict_into(self.host.tree, left)) is not None:
            place, ids, values = found
            gone.append(pages := _int32(values))
            self.host.store(place, ids, pages)
            place.release()
            left -= len(pages) * self.page_size
        pages = np.concatenate(gone)
        if self.states is not None:
            self.states.evict(pages)
        self._give_back(pages)

    def _give_back(self, pages: np.ndarray) -> None:
        if self.states is not None:
            self.states.drop(pages)
        self._free[self._num_free : self._num_free + len(pages)] = pages
        self._num_free += len(pages)

    def _fill(self, row: int, first: int, pages: np.ndarray) -> None:
        if not len(pages):
            return
        stop = first + len(pages)
        self.table[row, first:stop] = pages
        self.held[row] = max(int(self.held[row]), stop)
        before, places = self._writes[-1] if self._writes else (None, None)
        if isinstance(places, range) and before == row and places.stop == first:
            self._writes[-1] = row, range(places.start, stop)  # merging saves the overhead of an item in drain_writes
        else:
            self._writes.append((row, range(first, stop)))

    # ------------------------------------------------------------ invariants

    def check(self) -> None:
        """Assert that every page is in exactly one place and that rows agree with their leases. Walks everything."""
        self.tree.check()
        self.pins.check()
        assert self.free_pages + self.leased_pages + self.evictable_pages == self.total_pages, "pages add up"
        places = [self._free[: self._num_free], _int32(self.tree.values())]
        for row, request in self._running.items():
            shared = request.lease.length // self.page_size
            assert self.held[row] >= shared, "a row holds what its lease pins"
            assert np.array_equal(self.table[row, :shared], _int32(request.lease.values())), "a row shows its lease"
            places.append(self.table[row, shared : int(self.held[row])])
        pages = np.sort(np.concatenate(places))
        assert np.array_equal(pages, np.arange(1, self.total_pages + 1)), "every page is in exactly one place"
        if self.host is not None:
            self.host.check()
        if self.states is not None:
            self.states.check([request.state for request in self._running.values()], places[1])
