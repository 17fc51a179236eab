"""One sequence being computed, and how far it has come."""

from __future__ import annotations

import itertools
from array import array
from typing import TYPE_CHECKING

import numpy as np

from radixrt.messages import TOKEN_BYTES, Run, Sampling, tenant_of
from radixrt.tree import Lease

if TYPE_CHECKING:
    from radixrt.messages import Output, TokenLogprob
    from radixrt.worker.drafting import Guessing
    from radixrt.worker.matching import Matcher

_numbers = itertools.count()
GREEDY_BELOW = 1e-5
"""Temperatures below this count as 0."""


class Scores:
    """Scores of a request's tokens from `first` up to `end`, what it came with, each reported once; if `detailed`, with
    top log-probabilities."""

    __slots__ = ("_detailed", "_end", "_found", "_next")

    def __init__(self, first: int, end: int, detailed: bool) -> None:
        self._next = first
        self._end = end
        self._detailed = detailed
        self._found: list[float] | list[TokenLogprob] = []

    def add(self, position: int, scores: list[float] | list[TokenLogprob]) -> None:
        """Take the scores of the tokens from `position` on. After a preemption some come a second time, and those of
        generated tokens, which nobody asked for, come behind them."""
        fresh = scores[max(0, self._next - position) : max(0, self._end - position)]
        self._found.extend(fresh)
        self._next += len(fresh)

    def report(self, output: Output) -> None:
        """Put the scores that were not reported yet into an output."""
        if not self._found:
            return
        if self._detailed:
            output.prompt_logprobs = self._found
        else:
            output.scores = self._found
        self._found = []


class Request:
    """A sequence of token ids, prompt first, that the scheduler lets `computed` catch up with.

    number    unique in this process, unlike `id`
    row       page-table row while it runs, -1 while it waits
    computed  tokens whose KV is in pages, or will be when the planned steps have run
    pending   tokens that planned steps draw and that are not known here yet
    over      whether it has ended
    draws     whether its tokens are sampled; otherwise they are the likeliest
    jumps     whether tokens that its grammar forces may be appended without being drawn: only its text is wanted
    serial    whether what is drawn depends on the tokens before, and so has to wait until the host knows them
    lease     pins the part of its path that is in the tree (set while it runs)
    group     requests of one group count as arrived with its first (0: no group)
    arrival   tokens the worker had scheduled when it arrived: its age
    place     order among requests of the same arrival: id of the first of its group, own id
    hit       tokens the tree held when last looked up, while it waits
    seen      version of the tree at that look-up
    came      tokens it arrived with
    reached   tokens up to which chunks were planned; of those it arrived with, `cached_tokens` needed no chunk
    said      tokens it arrived with and those reported since
    void      tokens drawn in steps up to this one are discarded: its grammar forced others in their place
    scores    scores of its known tokens, if it asks for them
    matcher   state of its grammar (set before it is scheduled, if it has one)
    guessing  what its drafts are made from (set when drafts are first looked for)
    """

    __slots__ = (
        "id", "number", "namespace", "tenant", "tokens", "prompt_len", "sampling", "score_from", "limit", "stop_ids",
        "row", "computed", "lease", "arrival", "hit", "cached_tokens", "reached", "scores",
        "pending", "over", "serial", "draws", "matcher", "jumps",
        "came", "said", "void", "group", "place", "seen", "guessing",
    )  # fmt: skip

    def __init__(self, run: Run, limit: int, eos_ids: frozenset[int]) -> None:
        self.id = run.id
        self.number = next(_numbers)
        self.namespace = run.namespace
        self.tenant = tenant_of(run.namespace)
        self.tokens = array("i")
        self.tokens.frombytes(run.ids)
        self.prompt_len = run.prompt_len
        self.sampling: Sampling = run.sampling
        self.score_from = run.score_from
        self.limit = limit
        # With a grammar, eos ends it even so: where the grammar is complete nothing else can follow.
        keeps_eos = not run.sampling.ignore_eos or run.sampling.grammar is not None
        self.stop_ids = frozenset(run.sampling.stop_token_ids) | (eos_ids if keeps_eos else frozenset())
        self.row = -1
        self.computed = 0
        self.lease: Lease | None = None
        self.arrival = 0
        self.group = run.group
        self.place = (run.id, run.id)
        self.hit = 0
        self.seen = -1
        self.cached_tokens = 0
        self.reached = 0
        detailed = run.sampling.logprobs is not None
        self.scores = None if run.score_from is None else Scores(run.score_from, len(self.tokens), detailed)
        self.pending = 0
        self.over = False
        self.draws = run.sampling.temperature >= GREEDY_BELOW and run.sampling.top_p > 0
        self.matcher: Matcher | None = None
        self.guessing: Guessing | None = None
        self.came = self.said = len(self.tokens)
        self.void = 0
        self.jumps = run.score_from is None and run.sampling.logprobs is None and not run.sampling.logit_bias
        self.serial = run.score_from is not None or _depends_on_tokens(run.sampling)

    @property
    def penalized(self) -> bool:
        """Whether its sampling has a penalty on tokens that have occurred."""
        s = self.sampling
        return s.repetition_penalty != 1 or s.presence_penalty != 0 or s.frequency_penalty != 0

    @property
    def total(self) -> int:
        """Tokens known or drawn so far."""
        return len(self.tokens) + self.pending

    @property
    def behind(self) -> int:
        """Tokens known or drawn whose KV is not computed; 1 while it decodes."""
        return len(self.tokens) + self.pending - self.computed

    @property
    def caught_up(self) -> bool:
        """Whether it decodes: only its last token, a generated one, is left to compute, more may follow, and the token
        does not lie on a page of the tree."""
        last = self.behind == 1 and self.generated > 0 and self.total < self.limit
        return last and self.lease.length <= self.computed

    @property
    def reusable(self) -> int:
        """Tokens whose KV may come from the cache: all except the last and those whose logits are needed for scores."""
        last = len(self.tokens) - 1
        return last if self.score_from is None else min(last, self.score_from - 1)

    @property
    def generated(self) -> int:
        """Tokens after the prompt, known or drawn."""
        return self.total - self.prompt_len

    def reach(self, start: int, stop: int) -> None:
        """Note that a chunk of the tokens [start, stop) is planned: tokens between the chunks so far and this one were
        cached. (What it passes again after a preemption is its own work or was counted already.)"""
        self.cached_tokens += max(0, min(start, self.came) - self.reached)
        self.reached = max(self.reached, stop)

    def unsaid(self) -> list[int]:
        """Known tokens that were not reported yet; they count as reported."""
        tokens, said = self.tokens, self.said
        self.said = now = len(tokens)
        return [tokens[-1]] if now == said + 1 else list(tokens[said:])

    def path(self, start: int, stop: int | None = None) -> memoryview:
        """Tokens [start, stop) as int32, without a copy; must be dropped before the sequence grows."""
        return memoryview(self.tokens)[start:stop]


def from_run(run: Run, max_model_len: int, vocab_size: int, eos_ids: frozenset[int]) -> Request:
    """Make a Request of a Run. ValueError names the field that is wrong."""
    if not run.ids or len(run.ids) % TOKEN_BYTES:
        raise ValueError("ids: expected int32 token ids, at least one")
    total = len(run.ids) // TOKEN_BYTES
    if np.maximum.reduce(np.frombuffer(run.ids, np.uint32)) >= vocab_size:  # a negative id is huge
        raise ValueError(f"ids: a token id is outside the vocabulary of {vocab_size}")
    if not 1 <= run.prompt_len <= total:
        raise ValueError(f"prompt_len: {run.prompt_len} of {total} tokens")
    if total > max_model_len:
        raise ValueError(f"ids: {total} tokens, at most {max_model_len} fit")
    if run.score_from is not None and not 1 <= run.score_from <= total:
        raise ValueError(f"score_from: {run.score_from} of {total} tokens")
    wanted = run.sampling.max_tokens
    limit = max_model_len if wanted is None else min(run.prompt_len + max(wanted, 0), max_model_len)
    return Request(run, max(limit, total), eos_ids)


def _depends_on_tokens(s: Sampling) -> bool:
    """Whether the next token, or what is reported with it, depends on more than logits, position and seed."""
    return bool(
        s.repetition_penalty != 1
        or s.presence_penalty
        or s.frequency_penalty
        or s.logit_bias
        or s.min_tokens
        or s.logprobs is not None
        or s.grammar is not None
    )
