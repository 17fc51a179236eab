"""The router's state of one worker: its registration, when it was last heard, its load."""

from __future__ import annotations

from typing import NamedTuple

from radixrt.messages import Load, Register
from radixrt.router.core.incidents import Record
from radixrt.router.placement.cost import Candidate

MAX_SECONDS = 2.0
"""For at most this long after its last message a worker is assumed to compute: it sends one after each step."""
KNOWN_PROMPTS, KNOWN_TOKENS = 4, 1024
"""Its rate is known once it has computed so many prompts, and so many tokens beside the longest of them."""
Process = tuple[int, int]
"""(pid, incarnation) of a worker's process; see Register."""


def process(info: Register) -> Process:
    return info.pid, info.incarnation


def room_of(info: Register) -> str:
    """What a worker says of its context length and its pool, for the log."""
    slots = info.total_pages * info.page_size
    longest = min(info.max_model_len, slots)
    return f"contexts of up to {longest} tokens, KV pages for {slots}, {slots / max(1, longest):.1f} full contexts"


class Sent(NamedTuple):
    """A run that was dispatched to a worker."""

    tokens: int
    uncached: int
    """Tokens that the worker was expected to compute."""


class Worker:
    """A worker, from when it joins or comes back until it is lost or leaves. `number` is its owner id in the index, and
    is never reused."""

    __slots__ = (
        "asked", "crash_exonerated", "heard", "info", "load", "load_at", "name", "next_step", "number", "prompts",
        "rate_known", "record", "runs", "sent_at", "stalled", "stuck", "token_limit", "unseen_tokens", "waiting_tokens",
    )  # fmt: skip

    def __init__(self, number: int, info: Register, now: float) -> None:
        self.number = number
        self.info = info
        self.name = info.name
        self.token_limit = min(info.max_model_len, info.total_pages * info.page_size)
        """The most tokens of a sequence, by the model and by the size of the pool."""
        self.heard = now
        """When its last message arrived."""
        self.load_at = now
        """When `load` arrived."""
        self.asked = now
        """When a resync was last requested."""
        self.next_step: int | None = 1
        """The number of its next StepDone if no message is lost; None: any."""
        self.crash_exonerated = False
        """It was told to leave, or its process was heard again: none of its runs has killed it."""
        self.stalled = 0.0
        """For so many seconds it has had work, and no step has ended, as it said in its last heartbeat."""
        self.stuck = False
        """It said that this is longer than a step takes."""
        self.load = Load(free_pages=info.total_pages, total_pages=info.total_pages)
        self.record = Record(info.name)
        """Its failures; that of its former Worker, if it is the same process."""
        self.sent_at = now
        """When it was last sent a run."""
        self.runs: dict[int, Sent] = {}
        """By id, in the order of dispatch."""
        self.waiting_tokens = 0
        """Tokens of runs whose first token has not arrived."""
        self.unseen_tokens = 0
        """Uncached tokens of dispatched runs that `load` does not include yet."""
        self.rate_known = False
        """Whether its rate is that of several prompts (see `Candidate`)."""
        self.prompts: list[int] = []
        """Until then: uncached tokens of the prompts that it has computed."""

    @property
    def process(self) -> Process:
        return process(self.info)

    @property
    def adapters(self) -> set[tuple[str, int]]:
        """Names and versions of its LoRA adapters."""
        return {(adapter.name, adapter.version) for adapter in self.info.adapters}

    def serves(self, model: str, version: int) -> bool:
        """Whether it serves a model of that name, or that version of a LoRA adapter."""
        return model == self.info.model or (model, version) in self.adapters

    def adapter(self, model: str) -> str:
        """Of a model that it serves: its name if it is a LoRA adapter here, else "". Another worker may serve a model
        of that name without an adapter."""
        return "" if model == self.info.model else model

    def is_process(self, pid: int, incarnation: int) -> bool:
        """Whether this worker's process has that pid and incarnation; 0 matches any."""
        return pid in (0, self.info.pid) and incarnation in (0, self.info.incarnation)

    def follows(self, number: int) -> bool:
        """Whether the StepDone of that number follows the last one, none lost between them; 0: the worker does not
        count. Expects the one after it next."""
        expected, self.next_step = self.next_step, number + 1
        return number == 0 or expected is None or number == expected

    def dispatched(self, run: int, sent: Sent) -> None:
        self.runs[run] = sent
        self.unseen_tokens += sent.uncached
        self.waiting_tokens += sent.tokens

    def started(self, run: int) -> None:
        """The first token of a run has arrived."""
        if sent := self.runs.get(run):
            self.waiting_tokens -= sent.tokens
            if not self.rate_known:
                self._count_prompt(sent.uncached)

    def ended(self, run: int) -> None:
        """A run has ended, after `started`."""
        self.runs.pop(run, None)

    def update(self, load: Load, now: float) -> None:
        """Set a newer load, which includes the runs up to `load.newest_run`."""
        self.load, self.load_at = load, now
        self.unseen_tokens = 0
        for run, sent in reversed(self.runs.items()):
            if run <= load.newest_run:
                break
            self.unseen_tokens += sent.uncached

    def _count_prompt(self, tokens: int) -> None:
        self.prompts.append(tokens)
        beside_longest = sum(self.prompts) - max(self.prompts)
        if len(self.prompts) >= KNOWN_PROMPTS and beside_longest >= KNOWN_TOKENS:
            self.rate_known = True
            self.prompts.clear()

    def candidate(self, hit_tokens: int, now: float) -> Candidate:
        """The worker as placement sees it now. Its queue is that of the last load, less what it should have computed
        since, plus what was dispatched since."""
        load, info = self.load, self.info
        computed = int(min(now - self.load_at, MAX_SECONDS) * load.prefill_rate)
        queued = max(0, load.queued_tokens + load.launched_tokens - computed)
        return Candidate(
            worker=self.number,
            hit_tokens=hit_tokens,
            queued_tokens=queued + self.unseen_tokens,
            requests=len(self.runs),
            max_running=max(1, info.max_running),
            free_tokens=(load.free_pages + load.evictable_pages) * info.page_size,
            prefill_rate=load.prefill_rate,
            step_seconds=load.step_seconds,
            empty_tokens=load.free_pages * info.page_size,
            wanted_tokens=(load.total_pages - load.free_pages - load.evictable_pages) * info.page_size
            + self.waiting_tokens,
            total_tokens=info.total_pages * info.page_size,
            failed_share=self.record.failed_share(now) if self.record.incidents else 0.0,
            idle_seconds=0.0 if self.runs else now - self.sent_at,
            rate_known=self.rate_known,
        )
