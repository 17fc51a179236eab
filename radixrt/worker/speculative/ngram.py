"""Speculative decoding (arXiv 2211.17192) without a second model: draft tokens are looked up in earlier text, or come
from the model's own layer for it (`mtp_cost`).

Agents repeat what they have read and generated before: names, file contents, calls, in this conversation and in others.
Where the last tokens of a request occur earlier in it, or in recent outputs of its namespace, the tokens that follow
there are drafted (prompt lookup; hash chains in `repeats.cpp`). A step computes the last token and the draft after it,
one row each, as if they were decodes of several requests, and samples at each of them:

    tokens of the step     t  d1  d2  d3        d1 is right, d2 is not: a and b are accepted,
    sampled after each     a   b   c   e        as a = d1 and b != d2; c and e are discarded

A sampled token depends only on the tokens before it, the position and the seed, so the result is the same as without
drafts, but for the rounding of kernels. Penalties count the drafted tokens before a position. With a grammar, a draft
ends where the grammar forces what comes next. A decode step is bound by reading the weights, so a few more rows hardly
make it longer. How drafts are planned and verified is in `speculation`.
"""

from __future__ import annotations

import sys
from array import array
from collections import OrderedDict
from collections.abc import Sequence

from radixrt.worker.request import Request
from radixrt.worker.speculative._repeats import Repeats
from radixrt.worker.speculative.draft_state import DraftState
from radixrt.worker.speculative.mtp_cost import Passes, best_count, expected, mean

SHORTEST = 3
"""The fewest last tokens that must match earlier text; at most as many tokens as match are drafted."""
SHORTEST_IF_ALTERNATING = 5
"""The same for a request that begins to draft while others do not wait for it (`should_wait`): it then takes part in
every other step only, because its last token must be known before its next step is planned."""
WAIT = 0.1
"""Cost of planning a step only when the result of the one before is known, as a share of a step's time (4.63 ms become
5.16 for Llama 8B on an H200)."""
SURE = 16
"""A match of this many tokens is drafted from even if earlier drafts of the request were wrong, if rows are cheap."""
SURE_ACCEPTANCE = 0.5
"""Expected share of drafted tokens that are accepted, for a match of SURE tokens or more."""
MIN_ACCEPTANCE = 0.06
"""Below this acceptance nothing is drafted, however little a row costs."""
MEMORY = 0.8
"""Weight of the old value in the moving average of acceptance."""
FORGETTING = 0.98
"""Weight of earlier steps in `Costs`, for each step."""
ROW = 0.005
"""Cost of a row, as a share of a step of one row, until steps of different sizes were timed."""
MAX_ROWS = 128
"""The most decode and draft rows of a step with drafts; beyond that rows are no longer nearly free (an H200 takes 3.9
ms for 1, 4.6 for 128, 6.6 for 256 rows of Llama 8B)."""
MAX_MATCHED_REQUESTS = 8
"""The most generating requests with which requests with a grammar draft: for these the host has to match and mask the
drafted tokens, 20 to 90 µs each."""
MAX_SPARSE_REQUESTS = 8
"""The most generating requests with which a model with experts drafts: each additional row reads other experts, and the
steps of such models, which take the host longest, would have to wait for results (the agents of `bench.serve`'s
*sessions* got 2,863 tokens/s of Qwen3 30B with drafts among 64 of them, 3,043 without any)."""
TAIL = 64
"""The most last tokens that are compared with earlier text."""
RECENT_TOKENS = 1 << 17
"""Generated tokens that are remembered for a namespace: at least this many, at most twice. Each takes 16 to 50
bytes."""
RECENT_IN_ALL = 1 << 21
"""The most for all namespaces; those that have generated nothing for longest are forgotten first."""
RECENT_NAMESPACES = 1024
"""The most namespaces: each takes some memory, however little it has generated."""
END = array("i", [-1])
"""Separator between outputs."""


class RecentOutputs:
    """Recently generated tokens, by namespace. They are never used for another namespace."""

    def __init__(self, most: int = RECENT_TOKENS, in_all: int = RECENT_IN_ALL) -> None:
        self._most = most
        self._in_all = in_all
        self._texts: OrderedDict[str, list[Repeats]] = OrderedDict()
        self.tokens = 0

    def texts(self, namespace: str) -> Sequence[Repeats]:
        """The one or two texts of a namespace, the newer first. Each consists of many outputs."""
        return self._texts.get(namespace, ())

    def add(self, namespace: str, ids: array[int]) -> None:
        """Add an output, int32."""
        texts = self._texts.setdefault(namespace, [Repeats()])
        self._texts.move_to_end(namespace)
        texts[0].extend(ids)
        texts[0].extend(END)
        self.tokens += len(ids) + 1
        if len(texts[0]) > self._most:
            self.tokens -= sum(map(len, texts[1:]))
            texts[:] = [Repeats(), texts[0]]
        while len(self._texts) > 1 and (self.tokens > self._in_all or len(self._texts) > RECENT_NAMESPACES):
            _, gone = self._texts.popitem(last=False)
            self.tokens -= sum(map(len, gone))


def should_wait(drafting: int, requests: int) -> bool:
    """Whether the next step waits until the tokens of `drafting` requests are known, of `requests` that generate in
    all. Otherwise the others go on without them, and the drafting ones take part in every other step."""
    return drafting > WAIT * requests


class Costs:
    """Seconds of a decode step as a linear function of its rows: a least-squares fit, weighted towards recent steps."""

    def __init__(self) -> None:
        self._count = self._rows = self._seconds = self._squares = self._products = 0.0

    def add(self, rows: int, seconds: float) -> None:
        """Add a measured step."""
        values = 1.0, rows, seconds, rows * rows, rows * seconds
        sums = self._count, self._rows, self._seconds, self._squares, self._products
        self._count, self._rows, self._seconds, self._squares, self._products = (
            FORGETTING * old + new for old, new in zip(sums, values, strict=True)
        )

    def row(self, requests: int) -> float:
        """Cost of an additional row: tokens that `requests` requests, one row each, lose together because their step
        takes longer."""
        slope, base = self._fit() or (ROW, 1.0)
        return requests * slope / (base + requests * slope)

    def seconds(self, rows: int) -> float | None:
        """Of a step of so many rows: the mean of all until steps of different sizes were timed; None before any."""
        if fit := self._fit():
            return fit[1] + rows * fit[0]
        return self._seconds / self._count if self._count else None

    def _fit(self) -> tuple[float, float] | None:
        """(seconds of a row, of a step without any); None until steps of different sizes were timed."""
        spread = self._count * self._squares - self._rows**2
        if spread <= 0.01 * self._rows**2:
            return None
        slope = max(0.0, self._count * self._products - self._rows * self._seconds) / spread
        return slope, max(1e-9, (self._seconds - slope * self._rows) / self._count)


class Drafter:
    """Drafts up to `most` tokens for a request. They are looked up while at most `among` requests generate. `overlaps`
    and `predicts` are the runner's."""

    def __init__(self, most: int, overlaps: bool, among: int = sys.maxsize, predicts: bool = False) -> None:
        self.most = most
        self.predicts = predicts
        self.passes = Passes()
        self.among = among
        self.drafted = 0
        self.accepted = 0
        self.costs = Costs()
        self._overlaps = overlaps
        self._recent = RecentOutputs()

    def begins(self, request: Request, requests: int) -> bool:
        """Whether to start drafting for a decoding request, one of `requests` that generate. From then on it is planned
        only when its last token is known."""
        if request.score_from is not None or request.total + 2 > request.limit:
            return False
        draft_state = self._draft_state(request)
        if self._proposals(request, self.most, requests):
            return True
        matched, _, _ = self._match(request, draft_state)
        least = SHORTEST_IF_ALTERNATING if self._overlaps and not should_wait(1, requests) else SHORTEST
        return matched >= least and self._pays(request, matched, requests)

    def draft(self, request: Request, most: int, requests: int) -> list[int]:
        """Draft up to `most` tokens for one of `requests` that generate; its last token must be known. Empty if nothing
        is likely enough to be accepted."""
        draft_state = self._draft_state(request)
        # The last token before the limit is always sampled, after the draft.
        most = min(most, self.most, request.limit - len(request.tokens) - 1)
        found, own = self._look_up(request, most, requests), self._proposals(request, most, requests)
        likely = expected(draft_state.proposals.acceptance, len(own))
        draft_state.proposed = bool(own) and likely >= draft_state.acceptance * len(found)
        return own if draft_state.proposed else found

    def proposes(self, requests: Sequence[Request]) -> int:
        """How many tokens the next step is to propose for each of the requests that generate: none if that does not
        pay, by the acceptance of their proposals so far."""
        if not self.predicts or len(requests) > MAX_ROWS // 2:
            return 0
        states = [r.draft_state.proposals.acceptance for r in requests if r.draft_state is not None]
        count = max(len(requests), 1)
        return self._worth(mean(states), count, self.most, self.passes.share(self.costs.seconds(count)))

    def proposed(self, request: Request, length: int, ids: list[int]) -> None:
        """Remember what the model proposes to follow the first `length` tokens of a request."""
        proposals = self._draft_state(request).proposals
        proposals.ids, proposals.length = ids, length

    def _proposals(self, request: Request, most: int, requests: int) -> list[int]:
        """What the model proposed to follow the request's tokens, as much of it, up to `most` tokens, as is worth
        drafting."""
        own = self._draft_state(request).proposals
        if own.length != len(request.tokens) or (request.matcher is not None and requests > MAX_MATCHED_REQUESTS):
            return []
        return own.ids[: self._worth(own.acceptance, requests, most)]

    def _worth(self, acceptance: float, requests: int, most: int, each: float = 0.0) -> int:
        """How many proposals, at most `most`, are worth drafting for each of `requests` requests, if one for each costs
        a share `each` of a step's time beside their rows."""
        cost = max(self.costs.row(requests) + each, MIN_ACCEPTANCE)
        return best_count(acceptance, cost, WAIT if self._overlaps else 0.0, most)

    def _look_up(self, request: Request, most: int, requests: int) -> list[int]:
        """What followed the request's last tokens in earlier text, up to `most` tokens; empty if it is not likely
        enough to follow again."""
        matched, text, tail = self._match(request, self._draft_state(request))
        most = min(most, matched)
        if most < 1 or matched < SHORTEST or not self._pays(request, matched, requests):
            return []
        return text.propose(most, tail)

    def refuse(self, request: Request) -> None:
        """A request's grammar does not allow the first drafted token: count the draft as one of which none was
        accepted."""
        if (state := request.draft_state) is None:
            return
        if state.proposed:
            state.proposals.learn(1, 0)
        else:
            state.acceptance *= MEMORY

    def learn(self, request: Request, drafted: int, accepted: int) -> None:
        """Count a draft of `drafted` tokens, of which the first `accepted` were right."""
        draft_state = request.draft_state
        if draft_state is not None and draft_state.proposed:
            draft_state.proposals.learn(drafted, accepted)
        elif draft_state is not None:
            draft_state.acceptance = MEMORY * draft_state.acceptance + (1 - MEMORY) * accepted / drafted
        self.drafted += drafted
        self.accepted += accepted

    def ends(self, request: Request) -> None:
        """Remember what a finished request has generated."""
        if len(request.tokens) > request.prompt_len:
            self._recent.add(request.namespace, request.tokens[request.prompt_len :])

    def _pays(self, request: Request, matched: int, requests: int) -> bool:
        if requests > self.among or (request.matcher is not None and requests > MAX_MATCHED_REQUESTS):
            return False
        draft_state = self._draft_state(request)
        acceptance = max(draft_state.acceptance, SURE_ACCEPTANCE) if matched >= SURE else draft_state.acceptance
        return acceptance >= max(MIN_ACCEPTANCE, self.costs.row(requests))

    def _match(self, request: Request, draft_state: DraftState) -> tuple[int, Repeats, array[int] | None]:
        """Find the text with the longest match of a request's last tokens. Returns (length of the match, the text, the
        tail to pass to its `propose`: None if the text is the request's own)."""
        best, where, tail = draft_state.repeats.matched(), draft_state.repeats, None
        if texts := self._recent.texts(request.namespace):
            last = request.tokens[-TAIL:]
            for text in texts:
                if (length := text.matched(last)) > best:
                    best, where, tail = length, text, last
        return best, where, tail

    def _draft_state(self, request: Request) -> DraftState:
        """A request's state, with all its known tokens."""
        state = request.draft_state
        if state is None:
            state = request.draft_state = DraftState(Repeats())
        known = len(state.repeats)
        if known < len(request.tokens):
            with request.path(known) as new:
                state.repeats.extend(new)
        return state
