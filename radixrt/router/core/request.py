"""The router's state of a request in flight."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING

from msgspec import UNSET

from radixrt.messages import TOKEN_BYTES, CacheAction, Namespace, Origin, Run, Sampling, Scored, TokenLogprob, Usage
from radixrt.router.core.effects import Client
from radixrt.router.core.incidents import Incident, Record
from radixrt.router.core.worker import Worker

if TYPE_CHECKING:
    from radixrt.router.core.tool_waits import Paused
    from radixrt.router.placement.fork_groups import Group

PROGRESS_TOKENS = 16
"""A run that a worker has added this many tokens to is not the cause of its earlier losses and failures."""


class Request:
    """A client's request. `runs` are its choices, of which `open` are not finished."""

    __slots__ = (
        "asked",
        "bounded",
        "cache",
        "client",
        "group",
        "id",
        "namespace",
        "number",
        "open",
        "origin",
        "pin",
        "priority",
        "resident",
        "resumed",
        "runs",
        "scores",
        "stream",
    )  # fmt: skip

    def __init__(
        self,
        client: Client,
        id: int,
        namespace: Namespace,
        origin: Origin,
        *,
        stream: bool,
        scores: bool,
        priority: int = 0,
    ) -> None:
        self.client = client
        self.id = id
        self.namespace = namespace
        self.origin = origin
        self.stream = stream
        self.scores = scores
        self.priority = priority
        self.asked: int | None = None
        """The max_tokens of the client, if it is given."""
        self.bounded = False
        """Whether max_tokens is given, and some worker has room for as many."""
        self.pin: list[tuple[int, float]] = []
        """(tokens, seconds): prefixes of the prompt that its worker is to pin."""
        self.cache: list[CacheAction] = []
        """What is to become of its tokens when it has ended."""
        self.group: Group | None = None
        """The fork whose branches it is placed with, if any."""
        self.resumed: Paused | None = None
        """The pause that it ends, if any."""
        self.runs: list[RunState] = []
        self.resident: dict[Record, int] = {}
        """By worker process: tokens that were expected to be cached there when the first run was sent to it. What is
        found beyond that, this request may have computed."""
        self.open = 0
        self.number = 0
        """It is the router's so manieth; set by the core."""

    def scored(self) -> Scored:
        """The reply of a Score: log-probabilities by choice, usage summed; `worker` is that of the first choice."""
        usages = [run.usage() for run in self.runs]
        prompt, cached = sum(u.prompt_tokens for u in usages), sum(u.cached_tokens for u in usages)
        return Scored(self.id, [run.scores for run in self.runs], Usage(prompt, 0, cached, usages[0].worker))


class RunState:
    """One sequence of a request. Its prompt and emitted ids are enough to continue on another worker.

    `id` is new for each dispatch, so that late outputs of a lost worker match no run. `worker` is its worker, None
    while it waits for one, since `waiting_since`.
    """

    __slots__ = (
        "arrived_at",
        "best_hit",
        "ideal",
        "cached",
        "counts_hits",
        "emitted",
        "finished",
        "first_at",
        "hit",
        "id",
        "incidents",
        "index",
        "last_at",
        "logprobs",
        "losses",
        "worker",
        "most_cached",
        "on_trial",
        "problem",
        "prompt",
        "prompt_len",
        "prompt_logprobs",
        "queued",
        "request",
        "sampling",
        "score_from",
        "scores",
        "sent",
        "sent_at",
        "served_by",
        "started",
        "tries",
        "waiting_since",
    )  # fmt: skip

    def __init__(self, request: Request, index: int, prompt: bytes, sampling: Sampling, score_from: int | None) -> None:
        self.request = request
        self.index = index
        self.prompt = prompt
        self.prompt_len = len(prompt) // TOKEN_BYTES
        self.sampling = sampling
        self.score_from = score_from
        self.id = -1
        self.worker: Worker | None = None
        self.emitted = array("i")
        self.logprobs: list[TokenLogprob] | None = None
        self.scores: list[float] = []
        self.prompt_logprobs: list[TokenLogprob] | None = None
        """For the client's first Delta."""
        self.cached = 0
        self.counts_hits = True
        """Whether `cached` is still to be taken from outputs; False once the run has moved after its first token."""
        self.most_cached: int | None = None
        """The most tokens that `cached` may be, of a run that was sent again: see `Request.resident`."""
        self.hit = 0
        """Hit predicted at the first dispatch, in tokens."""
        self.best_hit = 0
        """The largest hit on any worker then."""
        self.ideal = 0
        """Tokens that an infinite cache would have hit."""
        self.started = False
        """Whether its worker has computed the prompt, which then counts as cached in the index, not as being
        computed."""
        self.finished = False
        self.sent = 0
        """Tokens emitted before it was sent to its worker."""
        self.tries: list[Incident] = []
        """Its failures since it last made progress."""
        self.incidents: list[Incident] = []
        """Its failures since it last gained a token: it may have caused them."""
        self.problem = ""
        """What its worker said when it last failed it."""
        self.on_trial = False
        """Whether it was sent to its worker as a trial (see `Dispatcher.held`)."""
        self.losses: list[Worker] = []
        """Workers that were lost while they served it, since it last made progress (`PROGRESS_TOKENS`)."""
        self.waiting_since: float | None = None
        self.queued = 0.0
        """Seconds that it waited at the worker that it was sent to last."""
        self.served_by = ""
        """The worker that it was sent to last; "" if to none."""
        self.arrived_at = self.sent_at = self.first_at = self.last_at = 0.0
        """Times of its arrival, which the core sets, of its first dispatch, and of its first and latest token, if there
        are any."""

    @property
    def reusable(self) -> int:
        """The most prompt tokens that may come from a cache: all but the last, and only those before the scored
        ones."""
        return (self.prompt_len if self.score_from is None else min(self.prompt_len, self.score_from)) - 1

    @property
    def remaining(self) -> int:
        """Tokens that it may still emit."""
        limit = self.sampling.max_tokens
        assert limit is not None, "admission sets it"
        return limit - len(self.emitted)

    @property
    def got_on(self) -> bool:
        """Whether it has made progress on its worker."""
        return len(self.emitted) >= self.sent + PROGRESS_TOKENS

    @property
    def scored(self) -> bool:
        """Whether the scores of its prompt have arrived: they come with the first token."""
        return not self.request.scores and bool(self.emitted)

    @property
    def name(self) -> str:
        """Its id for those who look at the router: of the request, and of a further choice."""
        return f"{self.request.number}.{self.index}" if self.index else str(self.request.number)

    @property
    def worker_name(self) -> str:
        return self.worker.name if self.worker else ""

    def cut(self, past: int) -> None:
        """Drop the last `past` tokens, which came after a stop string. The time of the one before them is not known;
        it is that of tokens that come at equal intervals:

        last_at = first_at + (last_at - first_at) * (kept - 1) / (all - 1)
        """
        tokens = len(self.emitted)
        if past < tokens:
            self.last_at = self.first_at + (self.last_at - self.first_at) * (tokens - past - 1) / (tokens - 1)
        del self.emitted[-past:]

    def detach(self) -> None:
        """No worker has it now. What its next worker computes again is not counted twice."""
        self.worker = None
        self.counts_hits = self.counts_hits and not self.emitted and not self.scores
        self.scores.clear()

    def usage(self) -> Usage:
        room, asked = self._room(), self.request.asked
        most = UNSET if asked is None or asked <= room else room
        return Usage(self.prompt_len, len(self.emitted), self.cached, self.worker_name, max_tokens=most)

    def _room(self) -> int:
        """For how many tokens in all there is room, or less if less were asked for."""
        limit = self.sampling.max_tokens
        assert limit is not None, "admission sets it"
        return min(limit, self.worker.token_limit - self.prompt_len) if self.worker else limit

    def order(self, ids: bytes, worker: Worker) -> Run:
        """The Run for its worker `worker`; `ids` are the prompt and the emitted tokens."""
        return Run(
            id=self.id,
            namespace=self.request.namespace.key,
            ids=ids,
            prompt_len=self.prompt_len,
            sampling=self.sampling,
            score_from=None if self.scored else self.score_from,
            pin=self.request.pin,
            cache=[] if self.index else self.request.cache,
            group=self.request.group.id if self.request.group else 0,
            adapter=worker.adapter(self.request.namespace.model),
            version=self.request.namespace.version,
            priority=self.request.priority,
        )


OnEnded = Callable[[Request, bool], None]
"""Called with a request that has ended, and whether its last choice did so by itself."""
