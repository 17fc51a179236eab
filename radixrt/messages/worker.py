"""Between the router and workers."""

from __future__ import annotations

import msgspec

from radixrt.messages.shared import FinishReason, Sampling, TokenLogprob

# ---------------------------------------------------------------- router -> worker


class Run(msgspec.Struct, tag="run", kw_only=True, omit_defaults=True):
    """Compute one sequence. `ids` is the prompt and, when a lost worker's request is taken over,
    the tokens already generated; the first `prompt_len` of them are the prompt.

    `score_from=k` asks for the log-probability of every token at index >= k of `ids` (k >= 1), with the alternatives
    that `sampling.logprobs` asks for, if it does; with max_tokens 0 nothing is generated. `pin` is a Generate's. Runs
    of one `group` (0: none) are queued as if they had come with the first of them.
    """

    id: int
    namespace: str
    ids: bytes
    prompt_len: int
    sampling: Sampling
    score_from: int | None = None
    pin: list[tuple[int, float]] = []
    group: int = 0


class Pin(msgspec.Struct, tag="pin"):
    """Keep what is cached of `ids` for so many seconds, if there is room. `name` is for an Unpin."""

    name: int
    namespace: str
    ids: bytes
    seconds: float


class Unpin(msgspec.Struct, tag="unpin"):
    """A Pin is not needed any more."""

    name: int


class Abort(msgspec.Struct, tag="abort"):
    ids: list[int]


class Snapshot(msgspec.Struct, tag="snapshot"):
    """Send the whole tree as events (a Cleared, then Stored): the index has missed some."""


class Unknown(msgspec.Struct, tag="unknown"):
    """The router does not know who this is: it has started anew, or forgotten the worker. Register again."""


class Stop(msgspec.Struct, tag="stop"):
    """Finish nothing more and exit; with a `reason` if the worker must not serve."""

    reason: str = ""


ToWorker = Run | Abort | Snapshot | Unknown | Stop | Pin | Unpin


# ---------------------------------------------------------------- worker -> router


class Stored(msgspec.Struct, tag="stored", frozen=True, array_like=True):
    """Run `run` grew: `ids` were cached at its index `at`. At 0 the run is new and hangs below
    (`parent`, `parent_at`): the first `parent_at` tokens of run `parent` (0: the root)."""

    namespace: str
    run: int
    at: int
    parent: int
    parent_at: int
    ids: bytes


class Removed(msgspec.Struct, tag="removed", frozen=True, array_like=True):
    """Run `run` keeps its first `keep` tokens; with 0 it is gone."""

    run: int
    keep: int


class Cleared(msgspec.Struct, tag="cleared", frozen=True, array_like=True):
    """Nothing is cached any more."""


CacheEvent = Stored | Removed | Cleared


class Load(msgspec.Struct, frozen=True, array_like=True):
    """A worker's state after a step, what placement needs. Rates are moving averages, 0 if unknown."""

    running: int = 0
    waiting: int = 0
    queued_tokens: int = 0
    """Tokens admitted or waiting that are not computed yet."""
    free_pages: int = 0
    evictable_pages: int = 0
    total_pages: int = 0
    prefill_rate: float = 0.0
    """Tokens a second while prefilling."""
    step_seconds: float = 0.0
    """Duration of a decode step."""
    evicted_tokens: int = 0
    """Since start."""
    preemptions: int = 0
    """Since start."""
    steps: int = 0
    plain_keys: int = 0
    """Since start: tokens whose K and V decodes attended to, counted for each of them, in a layer."""
    read_keys: int = 0
    """Of them, those that were read from memory: what requests of a batch share is read once."""
    busy_seconds: float = 0.0
    """Since start: that the device spent on steps."""
    forced_tokens: int = 0
    """Since start: generated tokens that a grammar left no choice of, and that were not drawn."""
    drafted_tokens: int = 0
    """Since start: tokens that were guessed by what stood before, and computed."""
    accepted_tokens: int = 0
    """Of them, those that were right."""
    launched_tokens: int = 0
    """Of prompts, in the step that has just begun: `queued_tokens` counts them no more."""
    newest_run: int = 0
    """Id of the Run that came last; the router draws them in order."""
    kept_tokens: int = 0
    """Of requests that have ended, leased for a moment for those who go on from them."""


class Register(msgspec.Struct, tag="register", kw_only=True):
    """First message of a worker, and again when it is Unknown. `name` is unique; a second Register of a name replaces
    the first, whose runs are dropped. Where another process sent the first, and does so again, it gets a Stop."""

    name: str
    model: str
    max_model_len: int
    page_size: int
    total_pages: int
    max_running: int
    kv_dtype: str = ""
    device: str = "cpu"
    pid: int = 0
    life: int = 0
    """Drawn by its process: two on two machines, or in two containers, may have one pid."""
    vocab_size: int = 0
    """Token ids the model takes; 0 if unknown."""


class Output(msgspec.Struct, array_like=True):
    """What one request gained in a step. `cached_tokens` counts prompt tokens reused so far.
    `logprobs` belong to `tokens`; `scores` to the tokens asked for by `score_from`, or `prompt_logprobs`, where
    `sampling.logprobs` is set."""

    id: int
    tokens: list[int] = []
    finish: FinishReason | None = None
    cached_tokens: int = 0
    logprobs: list[TokenLogprob] | None = None
    scores: list[float] | None = None
    stop: int | None = None
    """The token id that ended it."""
    error: str = ""
    prompt_logprobs: list[TokenLogprob] | None = None
    field: str = ""
    """Of the request, which is at fault for the error; "": the worker is."""


class StepDone(msgspec.Struct, tag="step"):
    """One worker step. `seq` is the number of `events[0]` counted over the worker's life, so that
    the next message must begin at seq + len(events); a gap asks for a Snapshot. `snapshot` marks the
    answer to one: `events` start from nothing, and seq is where counting goes on. `number` counts these messages from 1
    since the worker's Register, so that the router notices if one was lost with a connection; 0: it does not count."""

    outputs: list[Output]
    load: Load
    seq: int = 0
    events: list[CacheEvent] = []
    snapshot: bool = False
    number: int = 0


class Heartbeat(msgspec.Struct, tag="heartbeat"):
    """From the worker's own thread, so that a long step is not taken for a death."""

    name: str
    pid: int = 0
    life: int = 0
    """Of its Register; 0: of any. What the process before says of a name is not heeded."""


class Leave(msgspec.Struct, tag="leave"):
    """A worker says goodbye; the launcher says it for one that it saw die."""

    name: str
    reason: str = ""
    pid: int = 0
    life: int = 0
    """As of a Heartbeat."""
    planned: bool = False
    """It was told to stop: its requests are not the cause."""


ToRouter = Register | StepDone | Heartbeat | Leave
