"""The running requests, by what they need next. From its admission until it leaves or is preempted, each is in exactly
one list.

    behind --caught up--> decoding --its last step is planned--> ending
      ^                   ^      |
      |              drafting <--+ its text repeats itself
      +--tokens forced----+
"""

from __future__ import annotations

from collections.abc import Sequence

from radixrt.worker.building import Decodes
from radixrt.worker.request import Request


class Running:
    """The lists, and the arrays of the decoding requests, which are reused from step to step."""

    def __init__(self) -> None:
        self.behind: list[Request] = []
        """Have more than one token to compute; oldest first."""
        self.decoding: list[Request] = []
        """Gain one token a step."""
        self.drafting: list[Request] = []
        """Gain one or several tokens a step; planned only when their last token is known."""
        self.ending: list[Request] = []
        """Their last step is planned; they leave when its result is applied."""
        self.departures = 0
        """How many requests have left or were preempted so far."""
        self._decodes: Decodes | None = None
        """The arrays of `decoding`; None when the list has changed."""

    def __len__(self) -> int:
        return len(self.behind) + len(self.decoding) + len(self.drafting) + len(self.ending)

    @property
    def generating(self) -> int:
        """How many requests decode, with drafts or without."""
        return len(self.decoding) + len(self.drafting)

    def totals(self) -> dict[str, int]:
        """Total tokens of running requests, by tenant."""
        found: dict[str, int] = {}
        for requests in (self.behind, self.decoding, self.drafting, self.ending):
            for request in requests:
                found[request.tenant] = found.get(request.tenant, 0) + request.total
        return found

    def decodes(self) -> Decodes:
        """The decodes of the next step."""
        if self._decodes is None:
            self._decodes = Decodes(self.decoding)
        return self._decodes

    def know(self, drawn: list[int]) -> None:
        """Take in the tokens that a step drew, decodes first, unless a later step is already planned."""
        if self._decodes is not None and self.decoding and not self.decoding[0].pending:
            self._decodes.know(drawn)

    def remove(self, request: Request) -> None:
        """Take a request off its list."""
        self.departures += 1
        for found in (self.behind, self.ending, self.drafting):
            if request in found:
                found.remove(request)
                return
        self.decoding.remove(request)
        self._decodes = None

    def youngest(self, planned: Sequence[Request]) -> Request:
        """The youngest request that is neither `planned` nor ending; ValueError if there is none."""
        candidates = [r for r in self.behind + self.decoding + self.drafting if r not in planned]
        return max(candidates, key=lambda r: (r.arrival, r.id))

    def decode(self, request: Request) -> None:
        """Let a drafting request decode one token a step from now on."""
        self.drafting.remove(request)
        self.decoding.append(request)
        self._decodes = None

    def draft(self, found: list[Request]) -> None:
        """Let decoding requests be drafted for from now on."""
        self.decoding = [r for r in self.decoding if r not in found]
        self.drafting += found
        self._decodes = None

    def catch_up(self, request: Request) -> None:
        """Let a decoding or drafting request compute tokens that became known. They are few, so it goes before the
        prompts that are behind."""
        if request in self.decoding or request in self.drafting:
            self.remove(request)
            self.behind.insert(0, request)

    def end_decodes(self) -> None:
        """Move the decoding requests that have reached their limit, tokens being drawn included, to `ending`."""
        self.ending += [r for r in self.decoding if r.total >= r.limit]
        self.decoding = [r for r in self.decoding if r.total < r.limit]
        self._decodes = None

    def sort_behind(self) -> None:
        """Move the requests that have caught up to `decoding`, or to `ending` if they have nothing more to compute."""
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
