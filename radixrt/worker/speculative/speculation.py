"""Which requests draft tokens, with which pages and recurrent states, and which drafted tokens are accepted. What is
drafted, and whether it pays, is decided in `ngram`.

After a step with a draft, the KV of wrong tokens is in pages that the next tokens overwrite. A recurrent state cannot
be taken back, so there is one for each token: the last known token updates the request's own state, as always, and
each drafted token writes the state after it to a slot of its own (see `recurrent_states`). The one after the accepted
tokens becomes the request's own. Nothing is copied, and nothing is computed again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from radixrt.worker.cache.page_cache import PageCache
from radixrt.worker.cache.page_pool import OutOfPages
from radixrt.worker.plan import Draft, Plan, Result
from radixrt.worker.request import Request
from radixrt.worker.scheduler.running import Running
from radixrt.worker.speculative.ngram import MAX_ROWS, Drafter
from radixrt.worker.structured.masks import draft_all

PROMPTS_SHARE = 0.75
"""While prompts are to be computed, so much of a step is left to them, of what is not for the last tokens of requests
that generate: with a small `max_num_batched_tokens` drafts would otherwise take it all."""
MAX_NOTED_TOKENS = 1 << 17
"""Tokens after which no further requests are looked at for the first time after a step: their tokens are noted then, 23
ns each, and 64 requests with long prompts that begin to decode at once would stop all others."""
MIN_STATES = 2
"""A request begins to draft only if it and each other that drafts can have this many recurrent states."""


class Speculation:
    """Begins and plans the drafts of one scheduler, and verifies them. A step has at most `most_tokens` tokens."""

    def __init__(self, cache: PageCache, running: Running, most_tokens: int) -> None:
        self._cache = cache
        self._running = running
        self._most_tokens = most_tokens

    def begin(self, drafter: Drafter) -> None:
        """Start drafting for decoding requests that have begun to repeat earlier text."""
        running, states = self._running, self._cache.states
        requests = running.generating
        if requests > MAX_ROWS // 2:
            return
        most = (states.drafted + states.draftable) // MIN_STATES - len(running.drafting)
        decoding = self._noted(request for request in running.decoding if not request.is_slow)
        if most > 0 and (found := [r for r in decoding if drafter.begins(r, requests)]):
            running.draft(found[:most])

    def _noted(self, requests: Iterable[Request]) -> Iterator[Request]:
        """Those whose tokens are noted already, and others until MAX_NOTED_TOKENS of theirs are to be."""
        left = MAX_NOTED_TOKENS
        for request in requests:
            noted = request.draft_state is not None
            if noted or left > 0:
                yield request
            if not noted and request.draft_state is not None:
                left -= len(request.tokens)

    def proposes(self, drafter: Drafter) -> int:
        """How many tokens the next step is to propose for each request that gets a token (`Plan.proposes`): none if
        that does not pay, or if pages for them are not to be had but by taking them from what is kept."""
        if not drafter.predicts:
            return 0
        requests = [*self._running.decoding, *self._running.drafting]
        count = drafter.proposes(requests)
        pages = (len(requests) + 1) * (count // self._cache.page_size + 2)
        return count if count and self._cache.prefixes.can_allocate(pages) else 0

    def plan(
        self, drafter: Drafter, proposes: int = 0, prompts: bool = False
    ) -> list[tuple[Request, list[int], list[int], int]]:
        """Draft tokens for the drafting requests whose last token is known, and reserve pages and states for them. If
        `prompts` are to be computed, these get their share of the step.
        Requests for which there is no draft, or no room, move back to `decoding`. Returns (request, drafted ids, slots
        of recurrent states, how many tokens are to be proposed, at most `proposes`) of the others."""
        running, states = self._running, self._cache.states
        requests, ready = running.generating, [r for r in running.drafting if not r.in_flight_tokens]
        rows = self._rows(requests, prompts) - len(running.decoding)
        room = rows // max(len(ready), 1) - 1  # drafted tokens of each, beside its last token
        room = min(room, states.draftable // max(len(ready), 1))  # there are slots for all
        drafts = []
        for request in ready:
            ids = drafter.draft(request, room, requests)
            if ids and request.matcher is not None and not (ids := self._allowed(request, ids)):
                drafter.refuse(request)
            more = 0 if not ids else self.room_for(request, request.computed + 1 + len(ids), proposes)
            if ids and self._has_pages(request, len(ids) + more):
                drafts.append((request, ids, states.draft(request.state, len(ids)), more))
            else:
                running.decode(request)
        return drafts

    def _rows(self, requests: int, prompts: bool) -> int:
        """The most rows of decodes and drafts, of which `requests` are for last tokens."""
        most = self._most_tokens
        if prompts:
            most = min(most, requests + int((1 - PROMPTS_SHARE) * max(0, most - requests)))
        return min(MAX_ROWS, most)

    def _allowed(self, request: Request, ids: list[int]) -> list[int]:
        """As `Matcher.drafted`; empty if the request is slow."""
        return [] if request.is_slow else draft_all([(request, ids)])[0]

    def room_for(self, request: Request, position: int, proposes: int) -> int:
        """How many of so many proposals can be of use to a request, if they follow a token at this position: after
        those that are drafted, the last token before its limit is sampled."""
        return max(0, min(proposes, request.limit - position - 2))

    def reserve_proposals(self, request: Request, stop: int, proposes: int) -> int:
        """How many tokens a chunk that ends before position `stop` is to propose, at most `proposes`, and reserve pages
        for them; none if no token is sampled after it."""
        count = self.room_for(request, stop, proposes)
        if stop < request.total or request.score_from is not None or not count:
            return 0
        return count if self._has_pages(request, stop + count - request.computed - 1) else 0

    def take_proposals(self, drafter: Drafter, plan: Plan, requests: Sequence[Request], result: Result) -> None:
        """Remember the proposals for a step's requests, with the number of tokens that they follow."""
        drafts = {draft.first: draft for draft in plan.drafts}
        drafter.passes.add(result.proposing_seconds)
        for index, ids in result.proposals.items():
            accepted = drafts[index].accepted(result.tokens) if index in drafts else 0
            if not requests[index].finished:
                length = int(plan.starts[index] + plan.counts[index]) + accepted + 1
                drafter.proposed(requests[index], length, ids)

    def _has_pages(self, request: Request, count: int) -> bool:
        """Reserve pages for `count` drafted tokens. False if there are not enough."""
        try:
            self._cache.requests.reserve(request, request.computed + 1 + count)
        except OutOfPages:
            return False
        return True

    def verify(self, drafter: Drafter, request: Request, draft: Draft, result: Result) -> int:
        """How many tokens of a request's draft are accepted: its longest prefix that equals the tokens the model
        sampled. A running request counts them as computed, and goes on from the state after them."""
        accepted, first = 0, draft.first
        while accepted < len(draft.ids) and result.tokens[first + accepted] == draft.ids[accepted]:
            following = first + accepted + 1
            if draft.ids[accepted] in request.stop_ids or following in result.failed or following in result.stuck:
                break
            accepted += 1
        drafter.learn(request, len(draft.ids), accepted)
        request.extend(draft.ids[:accepted], computed=request.row >= 0)
        if request.row >= 0:
            self._cache.requests.accept(request, accepted)
        return accepted
