"""The interface between the scheduler and a runner: a Plan goes in, a Result comes back. Values only: a runner sees no
request and no lease, and a Plan can be sent to other processes as it is.

tokens of a step, concatenated:   d0 d1 d2 | p3 p3 p3 p3 | p4 p4
                                  decodes    prefill chunks
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from radixrt.messages import TokenLogprob
from radixrt.messages.ranks import RequestInfo, TreePath
from radixrt.worker.stuck import Stuck

if TYPE_CHECKING:
    from radixrt.checkpoint.lora_modules import LoraModule
    from radixrt.worker.cache.disk_figures import Disk

STATE_TOKENS = 4096
"""To copy a recurrent state from host memory takes about as long as the pages of so many tokens: a state of Qwen3-Next
has 75 MB, and a token 12 to 24 kB."""
FROM_DEVICE = -1
"""Placeholder for a token id that the host does not know yet: the token that the step before sampled for this row of
the page table, which is still on the device."""


@dataclass(frozen=True, slots=True)
class Draft:
    """Guessed token `ids` after the last token of a request. They are computed as 1 + len(ids) entries of the plan,
    from index `first` on: one for the last token and one for each guess. A recurrent state goes from entry to entry
    (`StateWork.runs`)."""

    ids: list[int]
    first: int

    def accepted(self, sampled: Sequence[int]) -> int:
        """How many guesses are right, from the first on, by the tokens that were sampled at each of the plan's
        indices."""
        right = (sampled[self.first + n] == id for n, id in enumerate(self.ids))
        return next((n for n, same in enumerate(right) if not same), len(self.ids))


@dataclass(frozen=True, slots=True)
class StateWork:
    """What a step does with recurrent states. Copies can be done in any order, or at once: no slot is written twice,
    and none that is read is written. Slot 0 is the null slot.

    tokens of a request in a step:   [ .............. | ...... | ......... ]
                                            within ---^--------^           ^--- saves"""

    slots: np.ndarray
    """int32[B]: slot of each request's state, which the step reads and writes. It is the state after the first `starts`
    tokens, and then after `counts` more. Drafted tokens (see `runs`) have slots of their own, which are only written.
    """
    restores: np.ndarray
    """int32[2, N]: (from, to), copied before the step. From slot 0: zeros."""
    saves: np.ndarray
    """int32[2, N]: (from, to), copied after the step."""
    within: np.ndarray = field(default_factory=lambda: np.zeros((3, 0), dtype=np.int32))
    """int32[3, M]: (live slot, tokens, to): the state of a request after so many of its tokens of this step, fewer than
    all, is stored in a slot as well."""
    runs: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    """int32[B]: how many entries, from this one on, each go on from the state of the one before: of a draft with its
    first entry, 0 with its others; 1 with all that are no drafts. Empty if there are no drafts."""

    @classmethod
    def nothing(cls) -> StateWork:
        """That of no requests."""
        none = np.zeros((2, 0), dtype=np.int32)
        return cls(none[0], none, none)

    def parts(self, counts: np.ndarray) -> Parts:
        """The requests' tokens, of which a step computes `counts`, cut where states are stored."""
        ends = np.cumsum(counts, dtype=np.int64)
        owners, targets = np.arange(len(counts)), self.slots.astype(np.int64)
        if not self.within.size and not self.runs.size:
            return Parts(targets, targets, np.concatenate([[0], ends]), owners)
        live, tokens, to = self.within.astype(np.int64)
        by_slot = np.argsort(targets)
        index = by_slot[np.searchsorted(targets, live, sorter=by_slot)]
        cuts = (ends - counts)[index] + tokens
        order = np.argsort(np.concatenate([ends, cuts]))
        if self.runs.size:
            owners = np.maximum.accumulate(np.where(self.runs > 0, owners, 0))
        pairs = (owners, index), (targets, to), (ends, cuts)
        owners, targets, ends = (np.concatenate(pair)[order] for pair in pairs)
        begins = np.diff(owners, prepend=-1) > 0
        sources = np.where(begins, self.slots[owners], np.roll(targets, 1))
        return Parts(sources, targets, np.concatenate([[0], ends]), owners)


def _no_copies() -> np.ndarray:
    return np.zeros((2, 0), dtype=np.int32)


@dataclass(frozen=True, slots=True)
class Moves:
    """Copies between the device and host memory before a step, of pages (see `host_tier`) and of recurrent states (see
    `host_recurrent_states`): first those to host memory, then whatever writes pages or states of the device."""

    offload: np.ndarray
    """int32[2, N]: (page, slot), copied to host memory."""
    onload: np.ndarray
    """int32[2, M]: (slot, page), copied from host memory."""
    states_offload: np.ndarray = field(default_factory=_no_copies)
    """int32[2, S]: (slot of the device, slot), copied to host memory."""
    states_onload: np.ndarray = field(default_factory=_no_copies)
    """int32[2, R]: (slot, slot of the device), copied from host memory. `StateWork` has no copies to these slots."""

    @property
    def is_empty(self) -> bool:
        return not (self.offload.size or self.states_offload.size or self.fills)

    @property
    def fills(self) -> bool:
        """Whether anything of the device is written."""
        return bool(self.onload.size or self.states_onload.size)


@dataclass(frozen=True, slots=True)
class Parts:
    """Parts of the sequences of a step, one after the other, int64 each."""

    sources: np.ndarray
    """[P]: slots of the states that they go on from."""
    targets: np.ndarray
    """[P]: slots of the states after them."""
    bounds: np.ndarray
    """[P + 1]: part p has the step's tokens bounds[p] to bounds[p + 1]."""
    owners: np.ndarray
    """[P]: indices of the requests; of a draft, of its first entry."""

    def after(self, count: int) -> Parts:
        """All but the first `count` parts."""
        return Parts(self.sources[count:], self.targets[count:], self.bounds[count:], self.owners[count:])


@dataclass(frozen=True, slots=True)
class Plan:
    """One step over B requests and T tokens, decodes (one token each) before chunks.

    All K and V of a step are written to their slots, layer by layer, before that layer's attention reads: a request
    may read pages that another one of the same step fills.
    """

    step: int
    requests: tuple[RequestInfo, ...]
    rows: np.ndarray
    """int32[B]: row of the page table."""
    starts: np.ndarray
    """int32[B]: position of the first token to compute; at least as many tokens are in pages already."""
    counts: np.ndarray
    """int32[B]: tokens to compute."""
    tokens: np.ndarray
    """int32[T]: token ids, or FROM_DEVICE for a decode of a runner that `overlaps`."""
    slots: np.ndarray
    """int32[T]: where K and V are written, page * page_size + offset. Page 0 is the null page, for tokens whose KV is
    cached already and that are computed for their logits or for the recurrent state only."""
    wants: np.ndarray
    """int32[B]: number of last positions whose logits are needed."""
    samples: np.ndarray
    """bool[B]: whether a token is sampled from the logits of the last position."""
    table_writes: np.ndarray
    """int32[3, N]: (row, index in the row, page) of each entry of the page table that changed since the last plan."""
    drafts: tuple[Draft, ...] = ()
    """A request with a draft appears in `requests` several times in a row: see Draft."""
    states: StateWork | None = None
    """None if the model has no recurrent states."""
    adapters: np.ndarray | None = None
    """int32[B]: number of each request's LoRA adapter, -1: none; None if no request has one."""
    proposes: np.ndarray | None = None
    """int32[B]: how many tokens are proposed to follow the token that is sampled at each index, by a runner that
    `predicts`; for a draft it stands at its first index, and they follow the last token that the step gives. Their
    request has pages for them. None: none."""
    moves: Moves | None = None
    """None if there are none."""
    paths: tuple[TreePath, ...] = ()
    """The requests' paths in the radix tree, with what this step computes, for a runner that `shares`; else empty. All
    were looked up at one moment: later, a name may be that of another node."""
    following: dict[int, list[int]] = field(default_factory=dict)
    """By index, for requests with `score_from`: the known tokens after the wanted positions."""
    prompt_tokens: int = 0
    """Tokens that are in chunks of prompts; chunks of forced tokens do not count."""
    needs_host_tokens: bool = False
    """Whether any request does: then `Runner.sample_deferred` samples its tokens."""
    wants_logits: bool = False
    """Whether any request needs more than the index of the largest logit."""

    @property
    def token_adapters(self) -> np.ndarray | None:
        """int32[T]: the same by token."""
        return None if self.adapters is None else np.repeat(self.adapters, self.counts)

    @property
    def needs_onload(self) -> bool:
        """Whether its requests have pages or states that come back from host memory before this step. Otherwise there
        is time until the next step."""
        if self.moves is None:
            return False
        rows, _, pages = self.table_writes
        if self.states is not None and np.isin(self.states.slots, self.moves.states_onload[1]).any():
            return True
        return bool(np.isin(pages[np.isin(rows, self.rows)], self.moves.onload[1]).any())

    @property
    def drafted(self) -> range:
        """The indices of all drafts' entries."""
        if not self.drafts:
            return range(0)
        last = self.drafts[-1]
        return range(self.drafts[0].first, last.first + 1 + len(last.ids))

    @property
    def ahead(self) -> dict[int, list[int]]:
        """For each index where there are any: the drafted tokens between the known tokens of its request and the token
        that is sampled at that index."""
        return {draft.first + n: draft.ids[:n] for draft in self.drafts for n in range(1, 1 + len(draft.ids))}


def moves_alone(step: int, moves: Moves, table_writes: np.ndarray) -> Plan:
    """A step that only copies, and has no requests."""
    none, never = np.zeros(0, dtype=np.int32), np.zeros(0, dtype=bool)
    return Plan(step, (), none, none, none, none, none, none, never, table_writes, moves=moves)


class Gained(NamedTuple):
    """Tokens of a request from position `first` on, int32. They follow those that its row had before; if `first` is 0,
    another request had the row."""

    first: int
    ids: np.ndarray


Histories = Callable[["Plan"], list[tuple[Sequence[int], bool]]]
"""See `Scheduler.histories`."""
MaskRoom = Callable[[int], np.ndarray]
"""See `Runner.mask_room`."""
NONE_ALLOWED = "allowed_token_ids, bad_words and the rest of the request allow no token"
NOT_SAMPLED = "the step was not sampled"


@dataclass(frozen=True, slots=True)
class SampleInputs:
    """What the sampling of a step depends on beside logits, positions and seeds. The host knows it when the result of
    the step before is applied. Indices are those of the plan's B requests."""

    gained: dict[int, Gained] = field(default_factory=dict)
    """For requests with penalties: their known tokens that were not given before."""
    banned: dict[int, list[int]] = field(default_factory=dict)
    """For those that are `adjusted`: ids that must not come next, beside what `RequestInfo` says."""
    masked: list[int] = field(default_factory=list)
    """Indices of the requests with a grammar."""
    masks: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), dtype=np.int32))
    """int32[len(masked), ceil(vocabulary / 32)], in memory from `Runner.mask_room`: the ids that their grammars allow,
    bit i % 32 of word i // 32 for id i."""
    stuck: dict[int, Stuck] = field(default_factory=dict)
    """See Result, as far as grammars are the reason."""


def may_be_next(request: RequestInfo, banned: Iterable[int], vocab_size: int) -> np.ndarray:
    """bool[vocab_size]: the ids that may come next, grammars aside."""
    found = np.full(vocab_size, not request.allowed)
    found[np.frombuffer(request.allowed, dtype=np.int64)] = True
    found[list(banned)] = False
    return found


@dataclass(frozen=True, slots=True)
class Result:
    """What a Plan's step produced. Lists and dicts go by the index of the plan's B requests."""

    tokens: list[int]
    """Sampled token; without meaning where nothing was sampled."""
    logprobs: list[TokenLogprob | None] = field(default_factory=list)
    """Of the sampled token, where `sampling.logprobs` is set; empty if no request asks for it."""
    scores: dict[int, list[float] | list[TokenLogprob]] = field(default_factory=dict)
    """For requests with `score_from`: the natural log-probability of the token after each wanted position, where that
    token is known; with the most likely alternatives where `sampling.logprobs` is set."""
    failed: dict[int, str] = field(default_factory=dict)
    """Requests whose logits are not finite, with the reason. Only they fail; the KV they computed is discarded."""
    stuck: dict[int, Stuck] = field(default_factory=dict)
    """Requests that allow no token, by their grammar or otherwise, with the reason. Only they fail; the KV they
    computed is valid."""
    proposals: dict[int, list[int]] = field(default_factory=dict)
    """What `Plan.proposes` asked for."""
    proposing_seconds: float = 0.0
    """How long that took for each token of a request; all requests together are one pass."""


class GroupLost(BaseException):
    """Raised by a runner of several ranks that are no longer in the same state. The worker has to end."""


class DeviceLost(BaseException):
    """Raised by the worker's loop: the device can run no step any more. The worker cannot go on."""


class Runner(Protocol):
    """Computes plans. `num_pages` counts the null page 0; `max_model_len` is the model's own limit in tokens."""

    page_size: int
    num_pages: int
    num_states: int
    """Slots of recurrent states, the null slot 0 included; 0 if the model has none."""
    vocab_size: int
    eos_ids: frozenset[int]
    max_model_len: int
    busy_seconds: float
    """See `messages.Load`."""
    shares: bool
    """Whether it reads the keys of several requests at once, where their paths in the tree are the same
    (`Plan.paths`)."""
    overlaps: bool
    """Whether step n+1 may be launched before the result of step n is read: sampled tokens stay on the device, by row
    of the page table."""

    predicts: bool
    """Whether it proposes tokens with the model's multi-token prediction layer (`Plan.proposes`)."""

    sparse: bool
    """Whether the model has experts, so that tokens differ in which weights they read."""

    disk: Disk | None
    """What outlives the process, below host memory; None: nothing does."""

    @property
    def page_bytes(self) -> int:
        """Bytes of KV in a page, on this rank; 0 if it has none."""

    @property
    def num_host_pages(self) -> int:
        """Slots of pages in host memory, slot 0, which is not used, included; 0: there are none."""

    @property
    def num_host_states(self) -> int:
        """The same for recurrent states."""

    @property
    def plain_keys(self) -> int:
        """See `messages.Load`."""

    @property
    def read_keys(self) -> int:
        """See `messages.Load`."""

    def bind(self, table: np.ndarray) -> None:
        """Called once with the page table, int32[rows, pages], which the host keeps writing to."""

    def audit(self, histories: Histories) -> None:
        """Called once, after `bind`, if the worker checks itself: a runner without a model compares what requests read
        with their known tokens."""

    def launch(self, plan: Plan) -> Callable[[], Result]:
        """Start a step, which may have copies and no requests. The returned function waits for its result; until
        then the host may plan the next step."""

    def move(self, moves: Moves) -> None:
        """Make copies without a step, while none is in flight, as `launch` begins with those of its plan."""

    def mask_room(self, count: int) -> np.ndarray:
        """Memory for the masks of `count` requests (`SampleInputs.masks`)."""

    def sample_deferred(self, inputs: SampleInputs) -> None:
        """Sample the tokens of the last launched step, if its plan `needs_host_tokens`. Called once the result of the
        step before is applied, and before the step's own result is waited for: that raises RuntimeError otherwise."""

    def read_adapter(self, module: LoraModule) -> Any:
        """Read a LoRA adapter, for `put_adapter`. Called in a thread beside the loop. Raises ValueError if it is not
        served."""

    def put_adapter(self, slot: int, module: LoraModule, adapter: Any) -> None:
        """Make an adapter that was read the one of number `slot`. Called when no step is in flight, and no request has
        that number. Raises ValueError, and changes nothing, if it does not fit the model."""

    def works(self) -> bool:
        """Called when a step has failed: whether other steps can be run. Some errors of a device persist."""

    def kill(self) -> None:
        """Called in another thread before this process ends at once: end the processes of other ranks, if any."""

    def close(self) -> None:
        """Called when the worker has left its loop."""
