"""A worker's cache: the only place where pages are allocated and freed.

    RequestPages    rows of the page table: what running requests read and write
         |  lease, publish, allocate
    PrefixCache     the radix tree of the device: match, insert, evict; pins and retained contexts hold leases in it
         |  allocate, free           \\  evict, onload
    PagePool        free pages        Tier: the CPU's memory, and a disk below it (see `tier`)

`Hints` does what clients ask for beside their requests. `RecurrentStatePool` has the slots of recurrent states; models
without have NoStates, and without host memory there is NullTier. The parts are made here to fit each other; others call
methods of the parts.
"""

from __future__ import annotations

from radixrt.worker.cache.disk_figures import Disk
from radixrt.worker.cache.disk_tier import DiskTier
from radixrt.worker.cache.eviction import RETURNS
from radixrt.worker.cache.hints import Hints
from radixrt.worker.cache.host_recurrent_states import HostRecurrentStatePool
from radixrt.worker.cache.host_tier import HostTier
from radixrt.worker.cache.page_pool import PagePool
from radixrt.worker.cache.prefix_cache import PrefixCache
from radixrt.worker.cache.recurrent_states import AnyStates, NoStates, RecurrentStatePool
from radixrt.worker.cache.request_pages import RequestPages
from radixrt.worker.cache.return_order import GRAIN, ReturnOrder
from radixrt.worker.cache.tier import NullTier, Tier

KEPT = 0.25
"""With host memory for at least this share of the pages, contexts are not kept for their next turns (see `retention`):
to copy one back takes little time, and its pages admit another request."""


class PageCache:
    """`num_pages` pages of `page_size` token slots for at most `rows` running requests of `max_model_len` tokens.

    Page 0 is the null page: it is never allocated, and what is written there is never read. With `events` tree and
    states record their changes for the router's index.
    `num_states` slots, of which slot 0 is never allocated, hold recurrent states; 0: the model has none.
    `num_host_pages` slots of host memory, of which slot 0 is not used, hold evicted pages; 0: there are none.
    `num_host_states` likewise for checkpoints of recurrent states: there are both if the model has such states.
    `disk`: what outlives the process (see `disk_tier`); it needs host memory.
    `eviction_policy` is one of `eviction.POLICIES`. State checkpoints have an order of their own (`checkpoint_order`).
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
        eviction_policy: str = "lru",
        disk: Disk | None = None,
    ) -> None:
        if bool(num_host_states) != bool(num_states and num_host_pages):
            raise ValueError("num_host_states: with recurrent states, host memory is for pages and states, or for none")
        self.page_size = page_size
        self.pool = PagePool(num_pages)
        host_states = (
            HostRecurrentStatePool(num_host_states, page_size, events, num_states - 1) if num_host_states else None
        )
        self.states: AnyStates = NoStates()
        if num_states:
            self.states = RecurrentStatePool(num_states, num_pages, events, host_states, page_size)
        self.tier: Tier = NullTier()
        if num_host_pages:
            self.tier = host = HostTier(
                num_host_pages,
                page_size,
                events,
                host_states,
                self.pool.total,
                eviction_policy,
                max_pinned_share,
            )
            if disk is not None:
                first = num_states + max(0, num_host_states - 1) - 1
                self.tier = DiskTier(host, disk, page_size, events, first)
        self.prefixes = PrefixCache(
            self.pool, page_size, self.states, self.tier, policy=eviction_policy, events=events,
            pinned_share=max_pinned_share,
        )  # fmt: skip
        if isinstance(self.tier, DiskTier):
            self.tier.attach(self.prefixes.tree, self.states)
        if eviction_policy == RETURNS:
            trees = [self.prefixes.tree, *([host.tree] if num_host_pages else [])]
            room = (self.pool.total + max(0, num_host_pages - 1)) * page_size
            self.prefixes.order = ReturnOrder(trees, room, max(page_size, GRAIN))
        self.requests = RequestPages(self.prefixes, self.states, self.tier, rows, max_model_len)
        self.hints = Hints(self.prefixes, self.tier)
        self.pins = self.prefixes.pins
        self.retained = self.prefixes.retained
        self.order = self.prefixes.order
        self.keeps = num_host_pages - 1 < KEPT * self.pool.total
        """Whether `retained` takes over leases of requests that have ended."""
        self.has_states = num_states > 0
        """Whether the model has recurrent states: these cannot be taken back to an earlier token, as KV can."""

    # ------------------------------------------------------------ figures

    @property
    def total_pages(self) -> int:
        return self.pool.total

    @property
    def free_pages(self) -> int:
        """Pages that hold nothing."""
        return self.pool.num_free

    @property
    def leased_pages(self) -> int:
        """Pages of running requests, in the tree or private, and pages that pins or `retained` hold."""
        return self.prefixes.leased_pages + self.requests.private_pages

    @property
    def evictable_pages(self) -> int:
        """Pages of the tree that no lease pins."""
        return self.prefixes.evictable_pages

    @property
    def evicted_tokens(self) -> int:
        """Tokens that were evicted since start, and are in no tier any more."""
        return self.tier.lost_pages * self.page_size

    # ------------------------------------------------------------ everything

    def clear(self) -> None:
        """Empty the tree, except for what running requests and pins hold, and the tiers below."""
        self.prefixes.clear()
        self.tier.erase()

    def clear_all(self) -> None:
        """As `clear`, with what pins hold, and all state checkpoints; but what would outlive the process stays."""
        self.pins.clear()
        self.prefixes.clear()
        self.states.drop_all()

    def check(self) -> None:
        """Assert that every page is in exactly one place and that rows agree with their leases. Walks everything."""
        assert self.free_pages + self.leased_pages + self.evictable_pages == self.total_pages, "pages add up"
        tree_pages = self.prefixes.check()
        self.pool.check(tree_pages, *self.requests.check(tree_pages))
