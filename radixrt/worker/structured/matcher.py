"""The grammar state of each request, and the masks of tokens that may come next.

A matcher reads the request's own tokens, up to the last known one, whenever a mask is needed. So it survives
preemption, and works for a request that another worker began.

What an ordinary grammar needs (`structured.ordinary`) is done in the step. What others need is watched
(`structured.watch`): if it takes long the step goes on without the request, which sits out (`structured.sit_out`) until
it is done, or fails.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from radixrt.requests.grammar_errors import explained
from radixrt.worker.request import Request
from radixrt.worker.structured.compile import BadGrammar, Compiled
from radixrt.worker.structured.jump_forward import SHORTEST, forced_text
from radixrt.worker.structured.stuck import LATE, Stuck, bad_grammar
from radixrt.worker.structured.watch import LATE_SECONDS, Task, Watch

STRAYED = bad_grammar("the tokens generated so far do not follow it")
DEAD_END = bad_grammar("no token of the vocabulary can come next")
SLOW_SECONDS = 0.005
"""CPU time of a request's next token beyond which it is not planned any more before its mask is there."""

_watch = Watch()


class Matcher:
    """The state of one request's text in its grammar. Where the grammar may end, the ids in `ends` are allowed: eos,
    and those `stop_token_ids` that have no text. With `ignore_eos`, eos is allowed only where nothing else is."""

    __slots__ = (
        "bans", "busy", "compiled", "ends", "forced", "jumped", "last", "masked", "matcher", "problem", "row",
        "seconds", "slow", "taken", "tenant",
    )  # fmt: skip

    def __init__(self, compiled: Compiled, request: Request) -> None:
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

    def compute(self, request: Request, jump: bool) -> None:
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

    def follow(self, request: Request) -> bool:
        """Read the tokens generated since the last call; False if they do not follow the grammar."""
        tokens, accept = request.tokens, self.matcher.accept_token
        while self.taken < len(tokens):
            if not accept(tokens[self.taken]):
                return False
            self.taken += 1
        return True

    def jump(self, request: Request) -> tuple[int, ...]:
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

    def may_jump(self, request: Request) -> bool:
        """Whether the request does not sample all tokens."""
        return self.compiled.spelling is not None and request.jumps

    def _forced(self, request: Request, least: int) -> tuple[int, ...]:
        """The tokens of the text that the grammar forces next; empty if they are fewer than `least`, or if the request
        samples all tokens."""
        if not self.may_jump(request):
            return ()
        text = forced_text(self.matcher)
        ids = self.compiled.spelling.before(text) if text else ()
        return ids if len(ids) >= least else ()

    def drafted(self, request: Request, ids: Sequence[int]) -> list[int]:
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

    def banned(self, request: Request, ahead: int = 0) -> Iterable[int]:
        """Ids that are allowed for the next token, or the one after `ahead` more, only if nothing else is."""
        if len(request.tokens) + ahead - request.prompt_len < request.sampling.min_tokens:
            return request.stop_ids
        return self.compiled.eos_ids if request.sampling.ignore_eos else ()


def watched(works: Sequence[tuple[Matcher, Callable[[], None]]]) -> list[bool]:
    """Do pieces of work on matchers that are not busy, in order. Returns which are done: the others were not begun, or
    their matcher is busy with them from now on, as they take long."""
    tasks = [Task(matcher.tenant, functools.partial(matcher.run, work)) for matcher, work in works]
    for matcher, _ in works:
        matcher.busy = True
    _watch.run(tasks)
    left = {matcher for (matcher, _), task in zip(works, tasks, strict=True) if task.begun and not task.done}
    for (matcher, _), task in zip(works, tasks, strict=True):
        if not task.begun and matcher not in left:
            matcher.busy = False
        if not task.done:
            matcher.slow = True
    return [task.done for task in tasks]


def jump_all(requests: Sequence[Request]) -> list[tuple[int, ...] | None]:
    """`Matcher.jump` of requests that have just gained a token. None: it is not known in time, or the request is slow,
    and the matcher may be busy with it."""
    found: list[tuple[int, ...] | None] = [None] * len(requests)
    works, indices, began = [], [], time.thread_time()
    for i, request in enumerate(requests):
        matcher = request.matcher
        if matcher.busy or matcher.slow or matcher.problem:
            continue
        if matcher.compiled.ordinary:
            with matcher.excused():
                found[i] = matcher.jump(request)
        else:
            works.append((matcher, functools.partial(matcher.compute, request, True)))
            indices.append(i)
    _note_time(requests, began)
    if works:
        for i, (matcher, _), done in zip(indices, works, watched(works), strict=True):
            if done:
                found[i], matcher.forced = matcher.forced, ()
    return found


def _note_time(requests: Sequence[Request], began: float) -> None:
    """If what a step has done itself since `began`, by time.thread_time(), took long, none of the grammars counts as
    ordinary any more."""
    if time.thread_time() - began > LATE_SECONDS:
        for request in requests:
            request.matcher.compiled.ordinary = False


def draft_all(drafts: Sequence[tuple[Request, Sequence[int]]]) -> list[list[int]]:
    """`Matcher.drafted` of requests with their drafted ids; empty where it is not known in time."""
    found: list[list[int]] = [[] for _ in drafts]

    def draft(i: int, request: Request, ids: Sequence[int]) -> None:
        found[i] = request.matcher.drafted(request, ids)

    works = []
    for i, (request, ids) in enumerate(drafts):
        matcher, work = request.matcher, functools.partial(draft, i, request, ids)
        if matcher.busy or matcher.problem:
            continue
        if matcher.compiled.ordinary:
            with matcher.excused():
                work()
        else:
            works.append((matcher, work))
    if works and not all(watched(works)):
        return [[] if request.matcher.busy else ids for (request, _), ids in zip(drafts, found, strict=True)]
    return found


def fill_masks(
    requests: Sequence[Request], out: np.ndarray, threads: int = 1, ahead: Mapping[int, Sequence[int]] | None = None
) -> dict[int, Stuck]:
    """Write into `out`, int32[len(requests), ceil(vocabulary / 32)] in C order, which tokens may come next in each of
    `requests`, all of which have a matcher: bit i % 32 of word i // 32 for id i. For rows in `ahead`, the mask is for
    the token after these drafted ids (see `Matcher.drafted`).

    Returns, by index, why a request cannot go on, or LATE if its mask is not there in time; its row allows every
    token."""
    ahead = ahead or {}
    problems = _fill_known(requests, out, threads, ahead)
    for i, request in enumerate(requests):
        if i in problems:
            out[i] = -1
        elif request.matcher.bans and (banned := request.matcher.banned(request, len(ahead.get(i, ())))):
            _ban(out[i], banned)
    # The largest word of an empty row is 0. So it is for a row with only sign bits set, hence the second check.
    for i in np.flatnonzero(out.max(1, initial=0) == 0).tolist():
        if not out[i].any():
            problems[i] = DEAD_END
            out[i] = -1
    return problems


def _fill_known(
    requests: Sequence[Request], out: np.ndarray, threads: int, ahead: Mapping[int, Sequence[int]]
) -> dict[int, Stuck]:
    """As `fill_masks`, without bans, and without a look at the masks."""
    problems: dict[int, Stuck] = {}
    known, others, began = [], [], time.thread_time()
    for i, request in enumerate(requests):
        matcher = request.matcher
        if not matcher.compiled.ordinary:
            others.append(i)
        elif matcher.problem:
            problems[i] = matcher.problem
        elif matcher.taken < len(request.tokens) and not matcher.follow(request):
            problems[i] = STRAYED
        elif i in ahead:
            out[i] = matcher.ahead(ahead[i])
        else:
            known.append(i)
    if known:
        _batch(threads).batch_fill_next_token_bitmask([requests[i].matcher.matcher for i in known], out, known)
    _note_time(requests, began)
    if others:
        _fill_watched(requests, others, out, ahead, problems)
    return problems


def _fill_watched(
    requests: Sequence[Request], indices: list[int], out: np.ndarray, ahead: Mapping[int, Sequence[int]],
    problems: dict[int, Stuck],
) -> None:  # fmt: skip
    """`_fill_known` for requests, by index, whose grammars are not ordinary."""
    rows: dict[int, np.ndarray] = {}
    todo: list[tuple[int, Matcher, Callable[[], None]]] = []

    def look(i: int, matcher: Matcher) -> None:
        rows[i] = matcher.ahead(ahead[i])

    for i in indices:
        request, matcher = requests[i], requests[i].matcher
        if matcher.busy:
            problems[i] = LATE
        elif i in ahead:
            todo.append((i, matcher, functools.partial(look, i, matcher)))
        elif matcher.masked != len(request.tokens) and not matcher.problem:
            todo.append((i, matcher, functools.partial(matcher.compute, request, False)))
    if todo:
        done = watched([(matcher, work) for _, matcher, work in todo])
        problems.update({i: LATE for (i, _, _), fine in zip(todo, done, strict=True) if not fine})
    for i in indices:
        matcher = requests[i].matcher
        if i in problems:
            continue
        if matcher.busy:
            problems[i] = LATE
        elif matcher.problem:
            problems[i] = matcher.problem
        else:
            out[i] = rows[i] if i in ahead else matcher.row


@functools.cache
def _batch(threads: int) -> Any:
    import xgrammar

    return xgrammar.BatchGrammarMatcher(threads)


def _ban(row: np.ndarray, ids: Iterable[int]) -> None:
    """Clear the bits of `ids` in a row, unless that would leave none."""
    left = row.view(np.uint32).copy()
    for i in ids:
        if i >> 5 < len(left):
            left[i >> 5] &= ~np.uint32(1 << (i & 31))
    if left.any():
        row.view(np.uint32)[:] = left
