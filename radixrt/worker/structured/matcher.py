"""The grammar state of one request.

A matcher reads the request's own tokens, up to the last known one, whenever a mask is needed (`structured.masks`). So
it survives preemption, and works for a request that another worker began.
"""

from __future__ import annotations

import contextlib
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np

from radixrt.messages import Sampling
from radixrt.requests.grammar_errors import explained
from radixrt.worker.structured.compile import BadGrammar, Compiled
from radixrt.worker.structured.jump_forward import SHORTEST, forced_text
from radixrt.worker.stuck import Stuck, bad_grammar

STRAYED = bad_grammar("the tokens generated so far do not follow it")
SLOW_SECONDS = 0.005
"""CPU time of a request's next token beyond which it is not planned any more before its mask is there."""


class Text(Protocol):
    """What a matcher reads of its request (`worker.request.Request`)."""

    tokens: array[int]
    prompt_len: int
    limit: int
    stop_ids: frozenset[int]
    sampling: Sampling
    tenant: str
    jumps: bool


class Matcher:
    """The state of one request's text in its grammar. Where the grammar may end, the ids in `ends` are allowed: eos,
    and those `stop_token_ids` that have no text. With `ignore_eos`, eos is allowed only where nothing else is."""

    __slots__ = (
        "bans", "busy", "compiled", "ends", "forced", "jumped", "last", "masked", "matcher", "problem", "row",
        "seconds", "slow", "taken", "tenant",
    )  # fmt: skip

    def __init__(self, compiled: Compiled, request: Text) -> None:
        """Raises BadGrammar if no token could end the text."""
        import xgrammar

        self.ends = request.stop_ids & compiled.ends
        if not self.ends:
            raise BadGrammar("grammar: no token ends a text: the model names none, and stop_token_ids no special one")
        self.compiled = compiled
        self.matcher = xgrammar.GrammarMatcher(compiled.grammar, override_stop_tokens=sorted(self.ends))
        self.taken = request.prompt_len
        """How many of the request's tokens were read, or belong to the prompt."""
        self.bans = request.sampling.min_tokens > 0 or request.sampling.ignore_eos
        """Whether `banned` may return any ids."""
        self.tenant = request.tenant
        self.busy = False
        """Whether a thread works on it beside the loop, which then must not use it."""
        self.slow = False
        """Whether its request is planned only when the mask for the next token is there (see SLOW_SECONDS)."""
        self.problem: Stuck | None = None
        """Why the request cannot go on."""
        self.forced: tuple[int, ...] = ()
        """What `compute` found to be forced; they count as read, and are to be appended."""
        self.row: np.ndarray | None = None
        """int32[1, words]: the mask that `compute` made, for the token after so many as `masked`."""
        self.masked = -1
        self.jumped = -1
        """After how many tokens `compute` looked for forced text."""
        self.seconds = self.last = 0.0
        """CPU time of what `run` has done so far, and of the last piece."""

    @property
    def delays(self) -> bool:
        """Whether its last mask is late, or was slow."""
        return self.busy or self.last > SLOW_SECONDS

    # ------------------------------------------------------------ beside the loop

    def compute(self, request: Text, jump: bool) -> None:
        """Read the new tokens, find the text that is forced next, if `jump`, and make the mask of the token after it.
        Sets `forced`, `row` and `masked`, or `problem`. May run in any thread, on a `busy` matcher."""
        if jump:
            self.jumped = len(request.tokens)
            self.forced = self.jump(request)
        if not self.forced and not self.follow(request):
            self.problem = STRAYED
        elif self.taken < request.limit:
            if self.row is None:
                self.row = np.empty((1, self.compiled.words), dtype=np.int32)
            self.matcher.fill_next_token_bitmask(self.row, 0)
            self.masked = self.taken

    def ahead(self, ids: Sequence[int]) -> np.ndarray:
        """int32[1, words]: the mask of the token after `ids`, a prefix of what `drafted` returned."""
        taken = next((n for n, i in enumerate(ids) if not self.matcher.accept_token(i)), len(ids))
        row = np.empty((1, self.compiled.words), dtype=np.int32)
        self.matcher.fill_next_token_bitmask(row, 0)
        self.matcher.rollback(taken)
        return row

    def run(self, work: Callable[[], None]) -> None:
        """Do a piece of work on this matcher, which is `busy` until then. An exception becomes its `problem`."""
        began = time.thread_time()
        try:
            work()
        except Exception as error:  # xgrammar does not document its exceptions
            self.problem = bad_grammar(explained(error))
        self.last = time.thread_time() - began
        self.seconds += self.last
        self.slow = self.slow or self.last > SLOW_SECONDS
        self.busy = False

    @contextlib.contextmanager
    def excused(self) -> Iterator[None]:
        """An exception within becomes its `problem`: xgrammar does not document its exceptions."""
        try:
            yield
        except Exception as error:
            self.problem = bad_grammar(explained(error))

    # ------------------------------------------------------------ the text

    def follow(self, request: Text) -> bool:
        """Read the tokens generated since the last call; False if they do not follow the grammar."""
        tokens, accept = request.tokens, self.matcher.accept_token
        while self.taken < len(tokens):
            if not accept(tokens[self.taken]):
                return False
            self.taken += 1
        return True

    def jump(self, request: Text) -> tuple[int, ...]:
        """The tokens of the text that the grammar forces next, up to the request's limit and before any stop id; empty
        if the next token is to be sampled. They count as read: the caller must append them to the request."""
        if len(request.tokens) >= request.limit or not self.follow(request):
            return ()
        ids = self._forced(request, SHORTEST if len(request.tokens) > request.prompt_len else 1)
        ids = ids[: request.limit - len(request.tokens)]
        ids = next((ids[:n] for n, i in enumerate(ids) if i in request.stop_ids), ids)
        for n, i in enumerate(ids):
            if not self.matcher.accept_token(i):
                self.matcher.rollback(n)
                return ()
        self.taken += len(ids)
        return ids

    def may_jump(self, request: Text) -> bool:
        """Whether the request does not sample all tokens."""
        return self.compiled.spelling is not None and request.jumps

    def _forced(self, request: Text, least: int) -> tuple[int, ...]:
        """The tokens of the text that the grammar forces next; empty if they are fewer than `least`, or if the request
        samples all tokens."""
        spelling = self.compiled.spelling
        if spelling is None or not request.jumps:
            return ()
        text = forced_text(self.matcher)
        ids = spelling.before(text) if text else ()
        return ids if len(ids) >= least else ()

    def drafted(self, request: Text, ids: Sequence[int]) -> list[int]:
        """The longest prefix of drafted ids that could be sampled one by one: it ends before a token that the grammar
        does not allow or that ends the text, and where forced text follows."""
        if not self.follow(request):
            return []
        taken = count = 0
        for i in ids:
            if i in request.stop_ids or i in self.compiled.silent or not self.matcher.accept_token(i):
                break
            taken += 1
            if self._forced(request, SHORTEST):
                break
            count += 1
        self.matcher.rollback(taken)
        return list(ids[:count])

    def banned(self, request: Text, ahead: int = 0) -> Iterable[int]:
        """Ids that are allowed for the next token, or the one after `ahead` more, only if nothing else is."""
        if len(request.tokens) + ahead - request.prompt_len < request.sampling.min_tokens:
            return request.stop_ids
        return self.compiled.eos_ids if request.sampling.ignore_eos else ()
