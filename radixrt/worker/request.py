"""One sequence being computed, and how far it has come."""

from __future__ import annotations

from array import array

from radixrt.messages import Run, Sampling
from radixrt.tree import Lease


class Request:
    """A sequence of token ids, prompt first, that the scheduler lets `computed` catch up with.

    row       page-table row while it runs, -1 while it waits
    computed  tokens whose KV is in pages
    lease     pins the part of the path that is in the tree (set while it runs)
    arrival   tokens the worker had scheduled when it came (its age in tokens)
    hit       tokens the tree held when last looked, while it waits
    """

    __slots__ = (
        "id", "namespace", "tokens", "prompt_len", "sampling", "score_from", "limit", "stop_ids",
        "row", "computed", "lease", "arrival", "hit", "cached_tokens", "admissions", "scores",
    )  # fmt: skip

    def __init__(self, run: Run, limit: int, eos_ids: frozenset[int]) -> None:
        self.id = run.id
        self.namespace = run.namespace
        self.tokens = array("i")
        self.tokens.frombytes(run.ids)
        self.prompt_len = run.prompt_len
        self.sampling: Sampling = run.sampling
        self.score_from = run.score_from
        self.limit = limit
        self.stop_ids = frozenset(run.sampling.stop_token_ids) | (frozenset() if run.sampling.ignore_eos else eos_ids)
        self.row = -1
        self.computed = 0
        self.lease: Lease | None = None
        self.arrival = 0
        self.hit = 0
        self.cached_tokens = 0
        self.admissions = 0
        self.scores: list[float] = []

    @property
    def total(self) -> int:
        """Tokens known so far."""
        return len(self.tokens)

    @property
    def behind(self) -> int:
        """Tokens known whose KV is not computed; 1 while it decodes."""
        return len(self.tokens) - self.computed

    @property
    def caught_up(self) -> bool:
        """Only its last token, which it generated, is left to compute, and no page of another holds that token."""
        return self.behind == 1 and self.generated > 0 and self.lease.length <= self.computed

    @property
    def reusable(self) -> int:
        """Tokens whose KV may come from the cache: all but the last, and those whose logits are to be scored."""
        last = len(self.tokens) - 1
        return last if self.score_from is None else min(last, self.score_from - 1)

    @property
    def generated(self) -> int:
        """Tokens after the prompt."""
        return len(self.tokens) - self.prompt_len

    def path(self, start: int, stop: int | None = None) -> memoryview:
        """Tokens [start, stop) as int32, not copied; drop it before the sequence grows."""
        return memoryview(self.tokens)[start:stop]
