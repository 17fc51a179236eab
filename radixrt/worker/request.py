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
"""Temperatures below it count as 0."""


class Scores:
    """Of the known tokens of a request, from `first` on: each is reported once. `detailed`: with others beside them."""

    __slots__ = ("_detailed", "_found", "_next")

    def __init__(self, first: int, detailed: bool) -> None:
        self._next = first
        self._detailed = detailed
        self._found: list[float] | list[TokenLogprob] = []

    def add(self, position: int, scores: list[float] | list[TokenLogprob]) -> None:
        """Take scores of the tokens from `position` on; after a preemption they come a second time."""
        fresh = scores[max(0, self._next - position) :]
        self._found.extend(fresh)
        self._next += len(fresh)

    def report(self, output: Output) -> None:
        """Put what there is into an output."""
        if not self._found:
            return
        if self._detailed:
            output.prompt_logprobs = self._found
        else:
            output.scores = self._found
        self._found = []


class Request:
    """A sequence of token ids, prompt first, that the scheduler lets `computed` catch up with.

    number    unlike that of any other request of this process
    row       page-table row while it runs, -1 while it waits
    computed  tokens whose KV is in pages, or will be when the steps that are planned have run
    pending   tokens that planned steps draw and that are not known here yet
    over      it has ended
    draws     its tokens are drawn, not the likeliest
    jumps     text that its grammar forces need not be drawn: nothing but the text is asked for
    serial    what is drawn for it depends on the tokens before: drawn when the host knows them
    lease     pins the part of the path that is in the tree (set while it runs)
    group     those of one group came with the first of them (0: none)
    arrival   tokens the worker had scheduled when it came (its age in tokens)
    place     among those that came at once: by the first of its group, then by itself
    hit       tokens the tree held when last looked, while it waits
    seen      version of the tree then
    came      tokens it came with
    reached   tokens that its chunks have come to; `cached_tokens` of those it came with it found on the way
    said      tokens it came with, and those reported since
    void      what steps up to this one drew for it is of no use: its grammar had forced what came there
    scores    of its known tokens, if it asks for them
    matcher   where its text stands in its grammar (set before it is scheduled, if it has one)
    guessing  what drafts of its next tokens are made from (set when they are first looked for)
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
        # With a grammar eos may end it all the same, where nothing else can follow.
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
        self.scores = None if run.score_from is None else Scores(run.score_from, detailed)
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
        """By what it has said."""
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
        """Only its last token, which it generated, is left to compute, others may follow, and no page of another holds
        that token."""
        last = self.behind == 1 and self.generated > 0 and self.total < self.limit
        return last and self.lease.length <= self.computed

    @property
    def reusable(self) -> int:
        """Tokens whose KV may come from the cache: all but the last, and those whose logits are to be scored."""
        last = len(self.tokens) - 1
        return last if self.score_from is None else min(last, self.score_from - 1)

    @property
    def generated(self) -> int:
        """Tokens after the prompt, known or drawn."""
        return self.total - self.prompt_len

    def reach(self, start: int, stop: int) -> None:
        """A chunk of the tokens [start, stop) is planned: what is new before it was found. (Not so what it comes by a
        second time, sent back to wait: that is its own, or was counted.)"""
        self.cached_tokens += max(0, min(start, self.came) - self.reached)
        self.reached = max(self.reached, stop)

    def unsaid(self) -> list[int]:
        """Tokens to report now."""
        tokens, said = self.tokens, self.said
        self.said = now = len(tokens)
        return [tokens[-1]] if now == said + 1 else list(tokens[said:])

    def path(self, start: int, stop: int | None = None) -> memoryview:
        """Tokens [start, stop) as int32, not copied; drop it before the sequence grows."""
        return memoryview(self.tokens)[start:stop]


def from_run(run: Run, max_model_len: int, vocab_size: int, eos_ids: frozenset[int]) -> Request:
    """A Request of a Run; ValueError names the field that is wrong."""
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
    """Whether more than the logits, the position and the seed decides on the next token, or is reported with it."""
    return bool(
        s.repetition_penalty != 1
        or s.presence_penalty
        or s.frequency_penalty
        or s.logit_bias
        or s.min_tokens
        or s.logprobs is not None
        or s.grammar is not None
    )
