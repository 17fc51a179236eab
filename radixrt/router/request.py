"""What the router remembers of a request in flight."""

from __future__ import annotations

from array import array
from collections.abc import Hashable
from typing import TYPE_CHECKING

from radixrt.messages import TOKEN_BYTES, Origin, Run, Sampling, Scored, TokenLogprob, Usage
from radixrt.router.member import Member

if TYPE_CHECKING:
    from radixrt.router.groups import Group
    from radixrt.router.pauses import Paused

Client = Hashable
"""Who asked: the ZMQ identity of a client."""


class Request:
    """One client request: `runs` are its choices, `open` of which are not finished."""

    __slots__ = (
        "bounded",
        "client",
        "group",
        "id",
        "model",
        "namespace",
        "open",
        "origin",
        "pin",
        "resumed",
        "runs",
        "scores",
        "stream",
        "tenant",
    )  # fmt: skip

    def __init__(
        self,
        client: Client,
        id: int,
        tenant: str,
        namespace: str,
        origin: Origin,
        model: str,
        *,
        stream: bool,
        scores: bool,
    ) -> None:
        self.client = client
        self.id = id
        self.tenant = tenant
        self.namespace = namespace
        self.origin = origin
        self.model = model
        self.stream = stream
        self.scores = scores
        self.bounded = False
        """The client has said how many tokens it wants at most, and there is room for as many."""
        self.pin: list[tuple[int, float]] = []
        """(tokens, seconds): prefixes of the prompt that its worker is to keep."""
        self.group: Group | None = None
        """The fork that it is admitted with."""
        self.resumed: Paused | None = None
        """The pause that it ends."""
        self.runs: list[RunState] = []
        self.open = 0

    def scored(self) -> Scored:
        """The reply of a Score: log-probabilities by choice, usage summed; `worker` is that of the first choice."""
        usages = [run.usage() for run in self.runs]
        prompt, cached = sum(u.prompt_tokens for u in usages), sum(u.cached_tokens for u in usages)
        return Scored(self.id, [run.scores for run in self.runs], Usage(prompt, 0, cached, usages[0].worker))


class RunState:
    """One sequence on its way: prompt and emitted ids suffice to go on at another worker.

    `id` is drawn anew for each dispatch, so that what a lost worker still says about it is nobody's.
    `member` is None while no worker serves it; `waiting_since` says from when.
    """

    __slots__ = (
        "best_hit",
        "bound",
        "cached",
        "counts_hits",
        "emitted",
        "failed_by",
        "finished",
        "hit",
        "id",
        "index",
        "logprobs",
        "losses",
        "member",
        "prompt",
        "prompt_logprobs",
        "request",
        "sampling",
        "score_from",
        "scores",
        "sent",
        "started",
        "waiting_since",
    )  # fmt: skip

    def __init__(self, request: Request, index: int, prompt: bytes, sampling: Sampling, score_from: int | None) -> None:
        self.request = request
        self.index = index
        self.prompt = prompt
        self.sampling = sampling
        self.score_from = score_from
        self.id = -1
        self.member: Member | None = None
        self.emitted = array("i")
        self.logprobs: list[TokenLogprob] | None = None
        self.scores: list[float] = []
        self.prompt_logprobs: list[TokenLogprob] | None = None
        """For the client's first Delta."""
        self.cached = 0
        self.counts_hits = True
        """False once tokens were emitted and the run moved: its prompt's hits are known already."""
        self.hit = 0
        """Hit predicted at the first dispatch, in tokens; `best_hit` the best of any worker then."""
        self.best_hit = 0
        self.bound = 0
        """What an infinite cache would have hit."""
        self.started = False
        """Its worker has computed the prompt: it is in the index as cached, no more as being computed."""
        self.finished = False
        self.sent = 0
        """Tokens that were emitted when it was sent to its worker."""
        self.failed_by: Member | None = None
        """One that has failed it, and gets it no more if there are others."""
        self.losses: list[Member] = []
        """Those that have served it, and then did no more, since it last got on."""
        self.waiting_since: float | None = None

    @property
    def prompt_len(self) -> int:
        return len(self.prompt) // TOKEN_BYTES

    @property
    def reusable(self) -> int:
        """Prompt tokens whose KV may come from a cache: all but the last, and those whose logits are to be scored."""
        return (self.prompt_len if self.score_from is None else min(self.prompt_len, self.score_from)) - 1

    @property
    def missing(self) -> int:
        """Tokens that it may yet emit."""
        return self.sampling.max_tokens - len(self.emitted)

    @property
    def scored(self) -> bool:
        """Nothing of its prompt is to be scored again: it came with the first token."""
        return not self.request.scores and bool(self.emitted)

    @property
    def worker(self) -> str:
        return self.member.name if self.member else ""

    def gone(self) -> None:
        """It is nobody's now; what its next worker is to say is not counted twice."""
        self.member = None
        self.scores.clear()
        self.counts_hits = self.counts_hits and not self.emitted

    def usage(self) -> Usage:
        return Usage(self.prompt_len, len(self.emitted), self.cached, self.worker)

    def order(self, ids: bytes) -> Run:
        """What a worker is asked for; `ids` are the prompt and what was emitted."""
        return Run(
            id=self.id,
            namespace=self.request.namespace,
            ids=ids,
            prompt_len=self.prompt_len,
            sampling=self.sampling,
            score_from=None if self.scored else self.score_from,
            pin=self.request.pin,
            group=self.request.group.id if self.request.group else 0,
        )
