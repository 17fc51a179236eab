"""The requests that run, by what they need next. Each is in one list from its admission until it leaves or is sent back
to wait.

    behind --caught up--> decoding --its last step is planned--> ending
      ^                   ^      |
      |              drafting <--+ it repeats what stands before
      +--tokens forced----+
"""

from __future__ import annotations

from collections.abc import Sequence

from radixrt.worker.building import Decodes
from radixrt.worker.request import Request


class Running:
    """Lists of requests, and the arrays of those that decode, which are kept from step to step."""

    def __init__(self) -> None:
        self.behind: list[Request] = []
        """More than one token to compute, oldest first."""
        self.decoding: list[Request] = []
        """A token a step."""
        self.drafting: list[Request] = []
        """One to several tokens a step: planned when their last token is known."""
        self.ending: list[Request] = []
        """Their last step is planned; they leave when its result comes."""
        self.departures = 0
        """How often one has left, or was sent back."""
        self._decodes: Decodes | None = None
        """Of `decoding`; None when that has changed."""

    def __len__(self) -> int:
        return len(self.behind) + len(self.decoding) + len(self.drafting) + len(self.ending)

    @property
    def generating(self) -> int:
        """How many decode, with drafts or without."""
        return len(self.decoding) + len(self.drafting)

    def totals(self) -> dict[str, int]:
        """Tokens that requests have in all, by tenant."""
        found: dict[str, int] = {}
        for requests in (self.behind, self.decoding, self.drafting, self.ending):
            for request in requests:
                found[request.tenant] = found.get(request.tenant, 0) + request.total
        return found

    def decodes(self) -> Decodes:
        """Of the next step."""
        if self._decodes is None:
            self._decodes = Decodes(self.decoding)
        return self._decodes

    def know(self, drawn: list[int]) -> None:
        """What a step drew, its decodes first: if no later plan runs, that is all there is to know of them."""
        if self._decodes is not None and self.decoding and not self.decoding[0].pending:
            self._decodes.know(drawn)

    def remove(self, request: Request) -> None:
        """It leaves, or is sent back."""
        self.departures += 1
        for found in (self.behind, self.ending, self.drafting):
            if request in found:
                found.remove(request)
                return
        self.decoding.remove(request)
        self._decodes = None

    def youngest(self, planned: Sequence[Request]) -> Request:
        """Of those that are not `planned`, and not done; ValueError if there is none."""
        candidates = [r for r in self.behind + self.decoding + self.drafting if r not in planned]
        return max(candidates, key=lambda r: (r.arrival, r.id))

    def decode(self, request: Request) -> None:
        """One that drafted gains a token a step from now on."""
        self.drafting.remove(request)
        self.decoding.append(request)
        self._decodes = None

    def draft(self, found: list[Request]) -> None:
        """Some that decode wait until their last token is known."""
        self.decoding = [r for r in self.decoding if r not in found]
        self.drafting += found
        self._decodes = None

    def catch_up(self, request: Request) -> None:
        """One that decodes or drafts has known tokens to compute, few: prompts that are long are not waited for."""
        if request in self.decoding or request in self.drafting:
            self.remove(request)
            self.behind.insert(0, request)

    def end_decodes(self) -> None:
        """Those that have all tokens that may come, known or drawn, decode no more."""
        self.ending += [r for r in self.decoding if r.total >= r.limit]
        self.decoding = [r for r in self.decoding if r.total < r.limit]
        self._decodes = None

    def sort_behind(self) -> None:
        """Requests that have caught up decode from now on, or have nothing more to compute."""
        still = []
        for request in self.behind:
            if request.behind == 0 or (request.total >= request.limit and request.pending):
                self.ending.append(request)
            elif request.caught_up:
                self.decoding.append(request)
                self._decodes = None
            else:
                still.append(request)
        self.behind = still
