"""Tokens that are guessed, and verified many at a time: speculative decoding (arXiv 2211.17192) without a second model.

Agents say what they have read, and what they have said before: names, file contents, calls, in this conversation and in
others. Where the last tokens of a request stand earlier in it, or in what was generated of late in its namespace, what
follows there is a draft of what comes next (prompt lookup; hash chains in `repeats.cpp`). A step computes the last
token and the draft behind it, one row each, as if they were decodes of several requests, and draws at each of them:

    tokens of the step   t  d1  d2  d3        d1 is right, d2 is not: a and b are gained,
    drawn after each     a   b   c   e        as a = d1 and b != d2; c and e are of no use

What is drawn depends on the tokens before it, the position and the seed alone, so that it is what would have been drawn
one by one, but for the rounding of kernels. A penalty counts the tokens of the draft before it; a draft of text that
follows a grammar ends where that forces what comes next. A step that reads all weights takes hardly longer for a few
rows more.
"""

from __future__ import annotations

import sys
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from radixrt.worker._repeats import Repeats

if TYPE_CHECKING:
    from radixrt.worker.plan import Draft
    from radixrt.worker.request import Request

SHORTEST = 3
"""Tokens that must match; as many as match are drafted."""
WORTH_A_REST = 5
"""The same, to begin with drafts among so many others that they do not wait (`waits`): until its last token is known, a
request rests for one of the steps that the others make."""
WAIT = 0.1
"""Of a step's time, what is lost where the next one is planned when its result is known (4.63 ms become 5.16 for Llama
8B on an H200)."""
SURE = 16
"""So long a match is followed even by a request whose drafts have been wrong, if rows are cheap."""
ACCEPTANCE, SURE_ACCEPTANCE = 0.4, 0.5
"""Share of its drafted tokens that is expected to be right: of a request that has drafted nothing yet, and of a long
match."""
LEAST_ACCEPTANCE = 0.06
"""Below it nothing is drafted, cheap as a row may be."""
MEMORY = 0.8
"""Weight of what was right before, in the moving average."""
FORGETTING = 0.98
"""Weight of earlier steps for what a row costs, a step."""
ROW = 0.005
"""What a row costs, in steps of a single one, as long as none had more."""
MOST_ROWS = 128
"""Decodes and drafts of a step; beyond, a row more takes its time (an H200 computes 3.9 ms for 1, 4.6 for 128, 6.6 for
256 of Llama 8B's)."""
MOST_MATCHED = 8
"""Requests among which those with a grammar draft: the host tries their tokens out and masks what follows, 20 to 90 µs
each."""
MOST_SPARSE = 8
"""Requests among which anybody drafts, where the model has experts: each row more reads others of them, and its steps,
which keep the host longest, would wait for it (the agents of `bench.serve`'s *sessions* got 2,863 tokens/s of
Qwen3 30B with drafts among 64 of them, 3,043 without any)."""
TAIL = 64
"""Tokens that are compared, at most."""
SAID_TOKENS = 1 << 17
"""Generated tokens of a namespace that are remembered: as many at least, twice as many at most. 16 to 50 bytes each."""
SAID_IN_ALL = 1 << 21
"""The same of all namespaces; those that generate nothing are forgotten first."""
SAID_NAMESPACES = 1024
"""Of them, at most: each takes some memory, however little it has generated."""
END = array("i", [-1])
"""Between answers."""


class Said:
    """What was generated of late, by namespace. None sees what another's has."""

    def __init__(self, most: int = SAID_TOKENS, in_all: int = SAID_IN_ALL) -> None:
        self._most = most
        self._in_all = in_all
        self._texts: OrderedDict[str, list[Repeats]] = OrderedDict()
        self.tokens = 0

    def texts(self, namespace: str) -> Sequence[Repeats]:
        """The newer first."""
        return self._texts.get(namespace, ())

    def add(self, namespace: str, ids: array[int]) -> None:
        """An answer, int32."""
        texts = self._texts.setdefault(namespace, [Repeats()])
        self._texts.move_to_end(namespace)
        texts[0].extend(ids)
        texts[0].extend(END)
        self.tokens += len(ids) + 1
        if len(texts[0]) > self._most:
            self.tokens -= sum(map(len, texts[1:]))
            texts[:] = [Repeats(), texts[0]]
        while len(self._texts) > 1 and (self.tokens > self._in_all or len(self._texts) > SAID_NAMESPACES):
            _, gone = self._texts.popitem(last=False)
            self.tokens -= sum(map(len, gone))


@dataclass(slots=True)
class Guessing:
    """What a request's drafts are made from."""

    repeats: Repeats
    acceptance: float = ACCEPTANCE
    """Share of its drafted tokens that was right of late."""


def waits(drafting: int, requests: int) -> bool:
    """Whether the next step is planned when the tokens of so many that draft are known, of as many requests in all.
    Otherwise the others go on without them, and they take part in every other step."""
    return drafting > WAIT * requests


class Costs:
    """Seconds of a step of decodes by its rows: a line through those of late (least squares)."""

    def __init__(self) -> None:
        self._count = self._rows = self._seconds = self._squares = self._products = 0.0

    def add(self, rows: int, seconds: float) -> None:
        """A step took so long."""
        values = 1.0, rows, seconds, rows * rows, rows * seconds
        sums = self._count, self._rows, self._seconds, self._squares, self._products
        self._count, self._rows, self._seconds, self._squares, self._products = (
            FORGETTING * old + new for old, new in zip(sums, values, strict=True)
        )

    def row(self, requests: int) -> float:
        """Tokens that so many requests together lose by a row more in their step, as it takes longer."""
        spread = self._count * self._squares - self._rows**2
        if spread <= 0.01 * self._rows**2:
            slope = ROW
            base = 1.0
        else:
            slope = max(0.0, self._count * self._products - self._rows * self._seconds) / spread
            base = max(1e-9, (self._seconds - slope * self._rows) / self._count)
        return requests * slope / (base + requests * slope)


class Drafter:
    """Drafts of up to `most` tokens, `among` as many requests at most. `rests`: steps overlap."""

    def __init__(self, most: int, rests: bool, among: int = sys.maxsize) -> None:
        self.most = most
        self.among = among
        self.drafted = 0
        self.accepted = 0
        self.costs = Costs()
        self._rests = rests
        self._said = Said()

    def begins(self, request: Request, requests: int) -> bool:
        """Whether one of so many requests that decode should be held back until its last token is known, to draft what
        follows."""
        if request.score_from is not None or request.total + 2 > request.limit:
            return False
        guessing = self._guessing(request)
        matched, _, _ = self._match(request, guessing)
        least = WORTH_A_REST if self._rests and not waits(1, requests) else SHORTEST
        return matched >= least and self._pays(request, matched, requests)

    def draft(self, request: Request, most: int, requests: int) -> list[int]:
        """Up to `most` tokens that may follow the last of one of so many requests, which is known; empty if nothing is
        likely enough."""
        guessing = self._guessing(request)
        matched, text, tail = self._match(request, guessing)
        # The last token that may come is drawn after all drafts.
        most = min(most, self.most, matched, request.limit - len(request.tokens) - 1)
        if most < 1 or matched < SHORTEST or not self._pays(request, matched, requests):
            return []
        return text.propose(most, tail)

    def refuse(self, request: Request) -> None:
        """Its grammar does not allow the first of a draft: as if all had been wrong."""
        if request.guessing is not None:
            request.guessing.acceptance *= MEMORY

    def learn(self, draft: Draft, accepted: int) -> None:
        """So many of its tokens were right."""
        guessing = draft.request.guessing
        if guessing is not None:
            guessing.acceptance = MEMORY * guessing.acceptance + (1 - MEMORY) * accepted / len(draft.ids)
        self.drafted += len(draft.ids)
        self.accepted += accepted

    def ends(self, request: Request) -> None:
        """What it has generated may be said again."""
        if len(request.tokens) > request.prompt_len:
            self._said.add(request.namespace, request.tokens[request.prompt_len :])

    def _pays(self, request: Request, matched: int, requests: int) -> bool:
        if requests > self.among or (request.matcher is not None and requests > MOST_MATCHED):
            return False
        guessing = self._guessing(request)
        acceptance = max(guessing.acceptance, SURE_ACCEPTANCE) if matched >= SURE else guessing.acceptance
        return acceptance >= max(LEAST_ACCEPTANCE, self.costs.row(requests))

    def _match(self, request: Request, guessing: Guessing) -> tuple[int, Repeats, array[int] | None]:
        """(tokens that match, the text where most do, the tail to find them by if that is another's)."""
        best, where, tail = guessing.repeats.matched(), guessing.repeats, None
        if texts := self._said.texts(request.namespace):
            last = request.tokens[-TAIL:]
            for text in texts:
                if (found := text.matched(last)) > best:
                    best, where, tail = found, text, last
        return best, where, tail

    def _guessing(self, request: Request) -> Guessing:
        found = request.guessing
        if found is None:
            found = request.guessing = Guessing(Repeats())
        known = len(found.repeats)
        if known < len(request.tokens):
            with request.path(known) as new:
                found.repeats.extend(new)
        return found
