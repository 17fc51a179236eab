"""Which requests draft tokens, with which pages and recurrent states, and which drafted tokens are accepted. What is
drafted, and whether it pays, is decided in `drafting`.

After a step with a draft, the KV of wrong tokens is in pages that the next tokens overwrite. A recurrent state cannot
be taken back, so there is one for each token: the last known token updates the request's own state, as always, and
each drafted token writes the state after it to a slot of its own (see `states`). The one after the accepted tokens
becomes the request's own. Nothing is copied, and nothing is computed again.
"""

from __future__ import annotations

from radixrt.worker.cache import OutOfPages, PageCache
from radixrt.worker.drafting import MOST_ROWS, Drafter
from radixrt.worker.plan import Draft, Result
from radixrt.worker.request import Request
from radixrt.worker.running import Running

LEAST_STATES = 2
"""A request begins to draft only if it and each other that drafts can have this many recurrent states."""


class Speculation:
    """Begins and plans the drafts of one scheduler, and verifies them. A step has at most `most_tokens` tokens."""

    def __init__(self, cache: PageCache, running: Running, most_tokens: int) -> None:
        self._cache = cache
        self._running = running
        self._most_rows = min(MOST_ROWS, most_tokens)

    def begin(self, drafter: Drafter) -> None:
        """Start drafting for decoding requests that have begun to repeat earlier text."""
        running, states = self._running, self._cache.states
        requests = running.generating
        if requests > MOST_ROWS // 2:
            return
        most = requests
        if states is not None:
            most = (states.drafted + states.draftable) // LEAST_STATES - len(running.drafting)
        if most > 0 and (found := [r for r in running.decoding if drafter.begins(r, requests)]):
            running.draft(found[:most])

    def plan(self, drafter: Drafter) -> list[tuple[Request, list[int], list[int]]]:
        """Draft tokens for the drafting requests whose last token is known, and reserve pages and states for them.
        Requests for which there is no draft, or no room, move back to `decoding`. Returns (request, drafted ids, slots
        of recurrent states) of the others."""
        running, states = self._running, self._cache.states
        requests, ready = running.generating, [r for r in running.drafting if not r.pending]
        rows = self._most_rows - len(running.decoding)
        room = rows // max(len(ready), 1) - 1  # drafted tokens of each, beside its last token
        if states is not None:
            room = min(room, states.draftable // max(len(ready), 1))  # there are slots for all
        found = []
        for request in ready:
            ids = drafter.draft(request, room, requests)
            if ids and request.matcher is not None and not (ids := request.matcher.drafted(request, ids)):
                drafter.refuse(request)
            if ids and self._has_pages(request, len(ids)):
                found.append((request, ids, [] if states is None else states.draft(request.state, len(ids))))
            else:
                running.decode(request)
        return found

    def _has_pages(self, request: Request, count: int) -> bool:
        """Reserve pages for `count` drafted tokens. False if there are not enough."""
        try:
            self._cache.reserve(request, request.computed + 1 + count)
        except OutOfPages:
            return False
        return True

    def verify(self, drafter: Drafter, draft: Draft, result: Result) -> int:
        """How many tokens of a draft are accepted: its longest prefix that equals the tokens the model sampled. A
        running request counts them as computed, and goes on from the state after them."""
        request, first = draft.request, draft.first
        accepted = 0
        while accepted < len(draft.ids) and result.tokens[first + accepted] == draft.ids[accepted]:
            following = first + accepted + 1
            if draft.ids[accepted] in request.stop_ids or following in result.failed or following in result.stuck:
                break
            accepted += 1
        drafter.learn(draft, accepted)
        request.tokens.extend(draft.ids[:accepted])
        if request.row >= 0:
            request.computed += accepted
            if self._cache.states is not None:
                request.state = self._cache.states.accept(request.state, accepted)
        return accepted
