"""The state of one request in a worker: its tokens, and how many of them are computed."""

from __future__ import annotations

import itertools
import time
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from radixrt.messages import TOKEN_BYTES, Run, Sampling, tenant_of
from radixrt.messages.ranks import RequestInfo, TreePath
from radixrt.tree import Lease
from radixrt.worker.plan import NONE_ALLOWED, may_be_next

if TYPE_CHECKING:
    from radixrt.messages import Output, TokenLogprob
    from radixrt.worker.speculative.draft_state import DraftState
    from radixrt.worker.structured.matcher import Matcher

_numbers = itertools.count()
GREEDY_BELOW = 1e-5
"""Temperatures below this count as 0."""
GREEDY_TOP_P = 1e-6
"""So do values of top_p below this: the most likely of a million tokens has at least this probability."""
Age = tuple[int, int, int]


class BadSampling(ValueError):
    """A sampling parameter that cannot be followed. `field` names it."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field


class Scores:
    """Log-probabilities of a request's tokens [first, end) among those it arrived with. Each is reported once; if
    `detailed`, with the most likely alternatives."""

    __slots__ = ("_detailed", "_end", "_found", "_next")

    def __init__(self, first: int, end: int, detailed: bool) -> None:
        self._next = first
        self._end = end
        self._detailed = detailed
        self._found: list[Any] = []
        """Of float or, if `detailed`, of TokenLogprob."""

    def add(self, position: int, scores: list[float] | list[TokenLogprob]) -> None:
        """Add the scores of the tokens from `position` on. Those that were added before (after a preemption) or belong
        to generated tokens are ignored."""
        fresh = scores[max(0, self._next - position) : max(0, self._end - position)]
        self._found += fresh
        self._next += len(fresh)

    def report(self, output: Output) -> None:
        """Move the unreported scores into an output."""
        if not self._found:
            return
        if self._detailed:
            output.prompt_logprobs = self._found
        else:
            output.scores = self._found
        self._found = []


class Request:
    """A sequence of token ids, prompt first, that the scheduler lets `computed` catch up with. Each field has one
    writer.

    Never changed:

    info            who it is and how it is sampled, as runners know it; `id`, `number`, `sampling`, `prompt_len`,
                    `limit` and `stop_ids` are its fields
    pinned          tokens of the prefixes that it pins
    group           requests of one group count as having arrived with its first (0: no group)
    priority        orders its tenant's waiting requests, lowest first (`messages.Priority`)
    jumps           whether forced tokens of its grammar may be appended without sampling: only its text is wanted
    initial_len     tokens it arrived with
    scores          log-probabilities of its known tokens, if it asks for them
    adapter         number of its LoRA adapter, -1 if it has none

    Written here:

    tokens          the known ones
    total           tokens so far: known ones, and those that planned steps sample, whose ids the host does not know yet
    computed        tokens whose KV is in pages, or will be when the planned steps have run
    discard_until   tokens sampled in steps up to this one are discarded: its grammar forced others in their place
    reached         end of the last planned chunk, in tokens
    cached_tokens   of the tokens it arrived with, those that no chunk had to compute
    reported        tokens it arrived with and tokens reported to the router since

    Written by `cache.request_pages`:

    row             page-table row while it runs, -1 while it waits
    state           slot of its recurrent state while it runs, if the model has any
    lease           pins the part of its path that is in the tree (set while it runs)

    Written by others:

    checkpoints     `state_checkpoints`: tokens, ascending, after which a checkpoint of its state is taken
    age             `scheduler.queue`: orders requests by arrival: tokens the worker had scheduled then, id of the first
                    of its group, own id
    hit             `scheduler.queue`: while it waits, tokens the tree held when last looked up
    hit_version     `scheduler.queue`: version of the cache at that look-up
    matcher         `compile_queue`: state of its grammar (set before it is scheduled, if it has one)
    draft_state     `ngram`: what its drafts are made from (set when drafts are first looked for)
    finished        `scheduler.finish`: whether it has ended
    arrived         `scheduler.admission`: when it arrived; 0.0 once it was admitted
    """

    __slots__ = (
        "info", "id", "number", "namespace", "tenant", "tokens", "prompt_len", "sampling", "score_from", "limit",
        "stop_ids", "pinned", "group", "priority", "jumps", "initial_len", "scores", "adapter", "total", "computed",
        "discard_until", "reached", "cached_tokens", "reported", "row", "state", "lease", "checkpoints", "age", "hit",
        "hit_version", "matcher", "draft_state", "finished", "arrived",
    )  # fmt: skip

    def __init__(self, run: Run, limit: int, eos_ids: frozenset[int], adapter: int = -1) -> None:
        self.info = info = _info(run, next(_numbers), limit, eos_ids)
        self.id, self.number = info.id, info.number
        self.sampling, self.prompt_len = info.sampling, info.prompt_len
        self.limit, self.stop_ids = info.limit, info.stop_ids
        self.namespace = run.namespace
        self.tenant = tenant_of(run.namespace)
        self.score_from = run.score_from
        self.adapter = adapter
        self.pinned = [tokens for tokens, _ in run.pin]
        self.group = run.group
        self.priority = run.priority
        self.tokens = array("i")
        self.tokens.frombytes(run.ids)
        self.initial_len = self.reported = self.total = len(self.tokens)
        s = run.sampling
        self.scores = None if run.score_from is None else Scores(run.score_from, self.total, s.logprobs is not None)
        self.jumps = run.score_from is None and s.logprobs is None and not _restricted(s)
        self.computed = self.reached = self.cached_tokens = self.discard_until = 0
        self.row = -1
        self.state = 0
        self.lease: Lease | None = None
        self.checkpoints: list[int] = []
        self.age: Age = (0, run.id, run.id)
        self.hit = 0
        self.hit_version = -1
        self.matcher: Matcher | None = None
        self.draft_state: DraftState | None = None
        self.finished = False
        self.arrived = time.monotonic()

    @property
    def in_flight_tokens(self) -> int:
        """Tokens that planned steps sample and whose ids the host does not know yet."""
        return self.total - len(self.tokens)

    @property
    def uncomputed_tokens(self) -> int:
        """Tokens so far whose KV is not computed; 1 while it decodes."""
        return self.total - self.computed

    @property
    def missing(self) -> int:
        """Of a waiting request: tokens so far that the tree did not hold when it was last looked up."""
        return self.total - self.hit

    @property
    def caught_up(self) -> bool:
        """Whether it decodes: only its last token is left to compute, that token was generated and is not cached in
        the tree, and more tokens may follow."""
        last = self.uncomputed_tokens == 1 and self.generated > 0 and self.total < self.limit
        return last and self.leased <= self.computed

    @property
    def reusable(self) -> int:
        """The most tokens that may come from the cache. The last token has to be computed for its logits, and with
        `score_from` so have all tokens from the one before it."""
        last = len(self.tokens) - 1
        return last if self.score_from is None else min(last, self.score_from - 1)

    @property
    def is_slow(self) -> bool:
        """Whether it takes long to tell which tokens its grammar allows."""
        return self.matcher is not None and self.matcher.slow

    @property
    def grammar_matcher(self) -> Matcher:
        """Its `matcher`, if it has a grammar."""
        assert self.matcher is not None
        return self.matcher

    @property
    def leased(self) -> int:
        """Tokens of its path that are in the tree, while it runs."""
        assert self.lease is not None
        return self.lease.length

    @property
    def tree_path(self) -> TreePath:
        """The nodes of its lease, while it runs."""
        assert self.lease is not None
        return self.lease.path()

    @property
    def generated(self) -> int:
        """Tokens after the prompt, those in flight included."""
        return self.total - self.prompt_len

    def append(self, token: int) -> None:
        """Add a token that a planned step has sampled."""
        self.tokens.append(token)

    def extend(self, ids: Sequence[int], computed: bool = False) -> None:
        """Add tokens that no planned step samples: forced text, or accepted drafts, which are `computed`."""
        self.tokens.extend(ids)
        self.total += len(ids)
        if computed:
            self.computed += len(ids)

    def plan(self, count: int, samples: int) -> None:
        """A step is planned that computes `count` tokens and samples as many as `samples`."""
        self.computed += count
        self.total += samples

    def resume_at(self, computed: int) -> None:
        """Go on after so many tokens: they need not be computed, or not again."""
        self.computed = computed

    def recompute_last(self) -> None:
        """Do not count the last known token as computed."""
        self.computed = min(self.computed, len(self.tokens) - 1)

    def discard_in_flight(self, step: int) -> None:
        """Discard what the planned steps, up to `step`, sample."""
        if self.in_flight_tokens:
            self.total, self.discard_until = len(self.tokens), step

    def samples_in(self, step: int) -> bool:
        """Whether the token that a step samples is still wanted, now that the step before has been applied."""
        return not self.finished and step > self.discard_until

    def reach(self, start: int, stop: int) -> None:
        """Record that a chunk of the tokens [start, stop) is planned: tokens between the previous chunk and this one
        were cached. (Those before `reached`, after a preemption, it computed itself, or they were counted before.)"""
        self.cached_tokens += max(0, min(start, self.initial_len) - self.reached)
        self.reached = max(self.reached, stop)

    def take_unreported(self) -> list[int]:
        """Return the known tokens that were not reported yet, and mark them as reported."""
        tokens, reported = self.tokens, self.reported
        self.reported = now = len(tokens)
        return [tokens[-1]] if now == reported + 1 else list(tokens[reported:])

    @property
    def restriction(self) -> str:
        """The field that restricts its tokens most; "" if none does."""
        s = self.sampling
        if s.allowed_token_ids:
            return "allowed_token_ids"
        if s.grammar is not None:
            return "grammar"
        return "bad_token_ids" if s.bad_token_ids else "min_tokens" if s.min_tokens else ""

    def banned(self, ahead: Sequence[int] = ()) -> set[int]:
        """Ids that must not follow its tokens and `ahead`: those that would complete sequences of bad_token_ids, and
        below min_tokens stop ids. With a grammar, its mask has the latter."""
        s = self.sampling
        banned: set[int] = set()
        if s.bad_token_ids:
            longest = max(map(len, s.bad_token_ids)) - 1
            recent = [*self.tokens[max(self.prompt_len, len(self.tokens) - longest) :], *ahead]
            banned = {last for *before, last in s.bad_token_ids if not before or recent[-len(before) :] == before}
        if s.grammar is None and len(self.tokens) + len(ahead) - self.prompt_len < s.min_tokens:
            banned |= self.stop_ids
        return banned

    def path(self, start: int, stop: int | None = None) -> memoryview:
        """Tokens [start, stop) as int32, without a copy. The view must be released before the sequence grows."""
        return memoryview(self.tokens)[start:stop]


def advance(decodes: Iterable[Request]) -> bool:
    """As `Request.plan` for a token of each of the decodes. Returns whether any of them has reached its limit."""
    ending = False
    for request in decodes:
        request.computed += 1
        request.total = total = request.total + 1
        if total >= request.limit:
            ending = True
    return ending


def from_run(
    run: Run, max_model_len: int, vocab_size: int, eos_ids: frozenset[int],
    adapters: Mapping[tuple[str, int], int] = {},
) -> Request:  # fmt: skip
    """Make a Request from a Run; `adapters` are the numbers of the LoRA adapters that are loaded, by name and version.
    Raises ValueError that names the invalid field, and BadSampling."""
    if not run.ids or len(run.ids) % TOKEN_BYTES:
        raise ValueError("ids: expected int32 token ids, at least one")
    total = len(run.ids) // TOKEN_BYTES
    if np.maximum.reduce(np.frombuffer(run.ids, np.uint32)) >= vocab_size:  # as uint32 a negative id is huge
        raise ValueError(f"ids: a token id is outside the vocabulary of {vocab_size}")
    if not 1 <= run.prompt_len <= total:
        raise ValueError(f"prompt_len: {run.prompt_len} of {total} tokens")
    if total > max_model_len:
        raise ValueError(f"ids: {total} tokens, at most {max_model_len} fit")
    if run.score_from is not None and not 1 <= run.score_from <= total:
        raise ValueError(f"score_from: {run.score_from} of {total} tokens")
    adapter = adapters.get((run.adapter, run.version), -1)
    if run.adapter and adapter < 0:
        raise ValueError(f"adapter: {run.adapter!r} is not loaded")
    wanted = run.sampling.max_tokens
    limit = max_model_len if wanted is None else min(run.prompt_len + max(wanted, 0), max_model_len)
    s = run.sampling
    if s.logit_bias or s.allowed_token_ids or s.bad_token_ids or s.stop_token_ids:
        _check_sampled_ids(s, vocab_size)
    request = Request(run, max(limit, total), eos_ids, adapter)
    if request.info.adjusted and request.limit > total:
        if not may_be_next(request.info, request.banned(), vocab_size).any():
            raise BadSampling(request.restriction, NONE_ALLOWED)
    return request


def _check_sampled_ids(s: Sampling, vocab_size: int) -> None:
    """Raises BadSampling for an id that no logit is of: it would break the step of all requests."""
    given = {
        "logit_bias": s.logit_bias,
        "allowed_token_ids": s.allowed_token_ids,
        "bad_token_ids": [id for ids in s.bad_token_ids for id in ids],
        "stop_token_ids": s.stop_token_ids,
    }
    for name, ids in given.items():
        if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
            raise BadSampling(name, f"a token id is outside the vocabulary of {vocab_size}")


def _info(run: Run, number: int, limit: int, eos_ids: frozenset[int]) -> RequestInfo:
    s = run.sampling
    # With a grammar eos ends it even with ignore_eos: once the grammar is complete nothing else can follow.
    keeps_eos = not s.ignore_eos or s.grammar is not None
    return RequestInfo(
        id=run.id,
        number=number,
        prompt_len=run.prompt_len,
        limit=limit,
        sampling=s,
        greedy=not (s.temperature >= GREEDY_BELOW and s.top_p >= GREEDY_TOP_P),
        needs_host_tokens=run.score_from is not None or _depends_on_tokens(s),
        adjusted=_restricted(s) or s.min_tokens > 0,
        allowed=np.unique(np.array(s.allowed_token_ids, dtype=np.int64)).tobytes() if s.allowed_token_ids else b"",
        stop_ids=frozenset(s.stop_token_ids) | (eos_ids if keeps_eos else frozenset()),
    )


def _restricted(s: Sampling) -> bool:
    return bool(s.logit_bias or s.allowed_token_ids or s.bad_token_ids)


def _depends_on_tokens(s: Sampling) -> bool:
    """Whether the next token, or what is reported with it, depends on more than logits, position and seed."""
    return bool(
        _restricted(s)
        or s.repetition_penalty != 1
        or s.presence_penalty
        or s.frequency_penalty
        or s.min_tokens
        or s.logprobs is not None
        or s.grammar is not None
    )
