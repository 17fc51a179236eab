"""Messages between the router and workers."""

from __future__ import annotations

from typing import Annotated

import msgspec

from radixrt.messages.shared import (
    CacheAction,
    CacheResult,
    Count,
    FinishReason,
    Number,
    Priority,
    Sampling,
    TokenLogprob,
)

# ---------------------------------------------------------------- router -> worker


class Run(msgspec.Struct, tag="run", kw_only=True, omit_defaults=True):
    """Compute one sequence. `ids` is the prompt (the first `prompt_len` tokens), followed by the tokens that another
    worker has generated, if the run was moved.

    `score_from=k` (k >= 1): report the log-probability of each token of `ids` from index k on, with alternatives as
    `sampling.logprobs` says. With max_tokens 0 nothing is generated. `pin` is as in Generate. Runs of one `group` (0:
    none) are queued as if they had arrived with the first of them. `adapter`: the LoRA adapter that computes it ("":
    none), of that `version`; the namespace differs from those of others.
    """

    id: int
    namespace: str
    ids: bytes
    prompt_len: int
    sampling: Sampling
    score_from: int | None = None
    pin: list[tuple[int, float]] = []
    group: int = 0
    adapter: str = ""
    version: int = 0
    priority: Priority = 0
    cache: list[CacheAction] = []
    """Of its tokens, generated ones included, when it has ended."""


class Adapter(msgspec.Struct, frozen=True, array_like=True):
    """A LoRA adapter, which is a model for clients. `version` is 0 for what a worker has loaded at its start; what is
    loaded later gets larger ones, and a higher version of a name is newer. `path`: its folder, on each worker's machine
    ("" for version 0)."""

    name: str
    version: int = 0
    path: str = ""


class LoadAdapter(msgspec.Struct, tag="load_adapter"):
    """Load an adapter, beside other versions of its name. The reply is an AdapterLoaded."""

    adapter: Adapter


class UnloadAdapter(msgspec.Struct, tag="unload_adapter"):
    """No Run will have this version of an adapter any more; those that have it finish with it."""

    name: str
    version: int


class Pin(msgspec.Struct, tag="pin"):
    """Keep the cached prefix of `ids` for `seconds`, if there is room. `name` identifies the pin in an Unpin."""

    name: int
    namespace: str
    ids: bytes
    seconds: float


class Unpin(msgspec.Struct, tag="unpin"):
    """Remove a Pin."""

    name: int


class WaitsFor(msgspec.Struct, tag="waits_for"):
    """The answer of a Run that has ended calls a tool of that name: its conversation returns when that has run."""

    id: int
    name: str


class CacheHint(msgspec.Struct, tag="cache_hint", omit_defaults=True):
    """Do with the path `ids` what `action` says. For the verb "delete" the namespace is any of the tenant, and there
    are no ids. The reply is a CacheHinted."""

    id: int
    namespace: str
    action: CacheAction
    ids: bytes = b""


class Abort(msgspec.Struct, tag="abort"):
    """End runs; what they computed stays cached. `ids` are the ids of Runs."""

    ids: list[int]


class Resync(msgspec.Struct, tag="resync"):
    """Send the whole tree as events (a Cleared, then Stored and Saved), as the index has missed some."""


class Clear(msgspec.Struct, tag="clear"):
    """Empty the cache, except for what running requests and pins hold."""


class Unknown(msgspec.Struct, tag="unknown"):
    """The router does not know the worker, because it was restarted or had lost the worker: register again."""


class Stop(msgspec.Struct, tag="stop"):
    """Exit without finishing any run. `reason` says why, if the worker is not allowed to serve. `restart`: its parent
    is to start it again."""

    reason: str = ""
    restart: bool = False


ToWorker = (
    Run | Abort | Resync | Clear | Unknown | Stop | Pin | Unpin | WaitsFor | CacheHint | LoadAdapter | UnloadAdapter
)  # fmt: skip


# ---------------------------------------------------------------- worker -> router

MAX_STATES = 1 << 24
"""Slots of recurrent states: the router has arrays of so many."""

Finite = Annotated[float, msgspec.Meta(ge=0.0, le=1e15)]


class Stored(msgspec.Struct, tag="stored", frozen=True, array_like=True):
    """Tokens were cached: `ids` were appended to run `run` of the worker's tree (see tree/structure.h), which had `at`
    tokens. If `at` is 0, the run is new, and follows the first `parent_at` tokens of run `parent` (`parent_at` 0: it
    begins at the root)."""

    namespace: str
    run: int
    at: int
    parent: int
    parent_at: int
    ids: bytes


class Removed(msgspec.Struct, tag="removed", frozen=True, array_like=True):
    """Tokens were evicted: only the first `keep` tokens of run `run` are left (0: none)."""

    run: int
    keep: int


class Cleared(msgspec.Struct, tag="cleared", frozen=True, array_like=True):
    """The cache is empty."""


class Saved(msgspec.Struct, tag="saved", frozen=True, array_like=True):
    """A checkpoint of the recurrent state after the first `tokens` tokens of a prefix is in `slot`: from there the
    prefix can be continued, as far as it is cached. `digest`: of these tokens (see `digests`). A prefix may have a
    checkpoint on the device and one in host memory, in slots of their own."""

    slot: int
    tokens: int
    digest: int


class Dropped(msgspec.Struct, tag="dropped", frozen=True, array_like=True):
    """The checkpoint in `slot` is gone."""

    slot: int


CacheEvent = Stored | Removed | Cleared | Saved | Dropped


class Load(msgspec.Struct, frozen=True, array_like=True):
    """A worker's state after a step, for placement and the report. Rates are moving averages, 0 if unknown."""

    running: int = 0
    waiting: int = 0
    queued_tokens: int = 0
    """Tokens of running and waiting requests that are still to be computed."""
    free_pages: int = 0
    evictable_pages: int = 0
    total_pages: int = 0
    prefill_rate: Finite = 0.0
    """Prompt tokens per second."""
    step_seconds: Finite = 0.0
    """Duration of a decode step."""
    evicted_tokens: int = 0
    """Since start; those that went to host memory count when they are evicted there."""
    preemptions: int = 0
    """Since start."""
    steps: int = 0
    """Since start."""
    plain_keys: int = 0
    """Since start: context lengths of decodes, summed over decodes and steps. So many keys would be read in a layer if
    each decode read all of its own."""
    read_keys: int = 0
    """Since start: keys that were read in a layer; a prefix that requests of a batch share is read once."""
    busy_seconds: Finite = 0.0
    """Since start: time that the device spent on steps."""
    forced_tokens: int = 0
    """Since start: generated tokens that were not sampled, because a grammar allowed no other."""
    drafted_tokens: int = 0
    """Since start: tokens that were drafted and verified."""
    accepted_tokens: int = 0
    """Of `drafted_tokens`, those that were accepted."""
    launched_tokens: int = 0
    """Prompt tokens in the step that has just begun; they are not in `queued_tokens` any more."""
    newest_run: int = 0
    """Id of the Run that arrived last; the router assigns ids in increasing order."""
    kept_tokens: int = 0
    """Tokens of ended requests that stay leased for a short time, for a request that continues them."""
    fetched_tokens: int = 0
    """Since start: tokens whose pages were evicted to host memory and came back from there."""
    host_tokens: int = 0
    """Tokens whose pages are in host memory."""
    disk_tokens: int = 0
    """Tokens whose pages are on disk (`--kv-disk-path`), of this model."""
    disk_bytes: int = 0
    """Bytes of all that is in its folder."""
    disk_hits: int = 0
    """Since start: requests for which pages were read from disk."""
    disk_read_tokens: int = 0
    disk_read_bytes: int = 0
    disk_read_seconds: Finite = 0.0
    """From a request's arrival to when its pages were read, summed."""
    disk_saved_seconds: Finite = 0.0
    """What computing these tokens would have taken, less that, summed over the requests for which it is more."""
    disk_written_tokens: int = 0
    disk_written_bytes: int = 0
    disk_lost_tokens: int = 0
    """Tokens that had gone from memory before they were written."""
    disk_evicted_tokens: int = 0
    """Tokens that were removed from disk to make room."""
    disk_early_tokens: int = 0
    """Of these, those that a request asked for within ten minutes."""


class Register(msgspec.Struct, tag="register", kw_only=True):
    """First message of a worker, sent again after an Unknown. `name` is unique: a Register of the same name replaces
    the earlier one, whose runs are dispatched again, unless that was from another process, which still serves: then the
    reply is a Stop."""

    name: str
    model: str
    max_model_len: Number
    page_size: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
    total_pages: Number
    max_running: Number
    kv_dtype: str = ""
    device: str = "cpu"
    pid: int = 0
    incarnation: int = 0
    """A random number that identifies the process: pids are not unique across machines or containers."""
    vocab_size: Count = 0
    """Number of token ids that the model accepts; 0 if unknown."""
    num_states: Annotated[int, msgspec.Meta(ge=0, lt=MAX_STATES)] = 0
    """Slots of recurrent states, a null slot 0 included, of the device and then of host memory; 0: the model has none.
    If it has, a cached prefix can be continued only where there is a checkpoint (see Saved)."""
    adapters: list[Adapter] = []
    """LoRA adapters of the model that it serves, each as a model of that name."""
    max_loras: Number = 0
    """How many may be loaded at once; 0: none can be loaded or unloaded."""
    host_tokens: Number = 0
    """Tokens whose pages host memory can hold."""


class Output(msgspec.Struct, array_like=True):
    """What a step added to one run. `cached_tokens` counts prompt tokens reused so far. `logprobs` are those of
    `tokens`. For the tokens from `score_from` on there are `scores`, or `prompt_logprobs` if `sampling.logprobs` is
    set."""

    id: int
    tokens: list[Count] = []
    finish: FinishReason | None = None
    cached_tokens: Count = 0
    logprobs: list[TokenLogprob] | None = None
    scores: list[float] | None = None
    stop: int | None = None
    """The token id that ended the run."""
    error: str = ""
    prompt_logprobs: list[TokenLogprob] | None = None
    field: str = ""
    """The field of the request that caused the error; "" if the worker caused it."""


class StepDone(msgspec.Struct, tag="step"):
    """Results of a worker's step.

    seq     sequence number of `events[0]` since the worker's start: the next message must have seq + len(events),
            otherwise the router requests a Resync
    resync  whether this is the reply to a Resync: `events` then describe the whole tree, and later events are
            numbered from `seq` on
    number  counts these messages from 1 since the Register, so that the router notices if one was lost with a
            connection (0: not counted)
    began   (id, seconds in the worker's queue) of the runs that it has begun with
    """

    outputs: list[Output]
    load: Load
    seq: int = 0
    events: list[CacheEvent] = []
    resync: bool = False
    number: int = 0
    began: list[tuple[int, Finite]] = []


class AdapterLoaded(msgspec.Struct, tag="adapter_loaded"):
    """An adapter is loaded, or it cannot be, because of `error`."""

    adapter: Adapter
    error: str = ""


class CacheHinted(msgspec.Struct, tag="cache_hinted", omit_defaults=True):
    """What became of a CacheHint, and for how many tokens; `bytes` of KV on one rank. `reason`: of what is not done."""

    id: int
    result: CacheResult
    tokens: Count = 0
    bytes: Number = 0
    reason: str = ""


class Heartbeat(msgspec.Struct, tag="heartbeat"):
    """Sent regularly by a thread of its own in a worker, so that a worker is not taken for lost during a long step."""

    name: str
    pid: int = 0
    incarnation: int = 0
    """As in the Register (0: any). Heartbeats of an earlier process of the name are ignored."""
    stalled: Finite = 0.0
    """For so many seconds its loop has had work, and no step has ended."""
    stuck: bool = False
    """That is longer than any step is expected to take (`watchdog`)."""


class Leave(msgspec.Struct, tag="leave"):
    """A worker has ended. Sent by the worker itself, or by its parent process if it died."""

    name: str
    reason: str = ""
    pid: int = 0
    incarnation: int = 0
    """As in a Heartbeat."""
    planned: bool = False
    """The worker was told to stop, so its requests are not suspected to be the cause."""


class Draining(msgspec.Struct, tag="draining"):
    """A worker was told to stop: it is to get no new runs, and leaves when it has finished those that it has."""

    name: str
    pid: int = 0
    incarnation: int = 0
    """As in a Heartbeat."""


ToRouter = Register | StepDone | AdapterLoaded | CacheHinted | Heartbeat | Leave | Draining
