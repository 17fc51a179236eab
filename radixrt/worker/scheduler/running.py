"""The running requests, in lists by what they need next. From its admission until it leaves or is preempted, each is in
exactly one list.

prefilling --caught up--> decoding --its last step is planned--> ending
      ^                   ^      |
      |              drafting <--+ its text repeats itself
      +--tokens forced----+      |
                         sitting <--+ its mask is late
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from radixrt.worker.request import Request
from radixrt.worker.scheduler.plan_builder import Decodes


class Running:
    """The lists, and the plan arrays of the decoding requests, which are reused from step to step."""

    def __init__(self) -> None:
        self.prefilling: list[Request] = []
        """Requests with more than one token to compute, in the order in which they came to be so."""
        self.decoding: list[Request] = []
        """Requests that generate one token per step."""
        self.drafting: list[Request] = []
        """Requests with drafts: one or several tokens per step, planned only when their last token is known."""
        self.sitting: list[Request] = []
        """Requests that steps go on without: the mask for their next token, or that token, is not there yet."""
        self.ending: list[Request] = []
        """Requests whose last step is planned; they leave when its result is applied."""
        self.departures = 0
        """How many requests have left or were preempted so far."""
        self._decodes: Decodes | None = None
        """The plan arrays of `decoding`; None if the list has changed since they were built."""

    def __len__(self) -> int:
        return sum(map(len, (self.prefilling, self.decoding, self.drafting, self.sitting, self.ending)))

    @property
    def generating(self) -> int:
        """How many requests generate tokens, with drafts or without, but for those that sit out."""
        return len(self.decoding) + len(self.drafting)

    def totals(self) -> dict[str, int]:
        """Total tokens of running requests, by tenant."""
        found: dict[str, int] = {}
        for requests in (self.prefilling, self.decoding, self.drafting, self.sitting, self.ending):
            for request in requests:
                found[request.tenant] = found.get(request.tenant, 0) + request.total
        return found

    def decodes(self) -> Decodes:
        """The decodes of the next step."""
        if self._decodes is None:
            self._decodes = Decodes(self.decoding)
        return self._decodes

    def set_sampled(self, sampled: list[int]) -> None:
        """Store the token ids that a step sampled, decodes first, for the next plan; not if that is planned already."""
        if self._decodes is not None and self.decoding and not self.decoding[0].in_flight_tokens:
            self._decodes.set_sampled(sampled)

    def remove(self, request: Request) -> None:
        """Remove a request from its list."""
        self.departures += 1
        for requests in (self.prefilling, self.ending, self.drafting, self.sitting):
            if request in requests:
                requests.remove(request)
                return
        self.decoding.remove(request)
        self._decodes = None

    def youngest(self, planned: Sequence[Request]) -> Request:
        """The youngest request that is neither `planned` nor ending; ValueError if there is none."""
        running = self.prefilling + self.decoding + self.drafting + self.sitting
        candidates = [r for r in running if r not in planned]
        return max(candidates, key=lambda r: (r.age[0], r.id))

    def decode(self, request: Request) -> None:
        """Move a drafting request to `decoding`."""
        self.drafting.remove(request)
        self.decoding.append(request)
        self._decodes = None

    def draft(self, requests: list[Request]) -> None:
        """Move decoding requests to `drafting`."""
        self.decoding = [r for r in self.decoding if r not in requests]
        self.drafting += requests
        self._decodes = None

    def catch_up(self, request: Request) -> None:
        """Move a decoding or drafting request that has several tokens to compute to `prefilling`."""
        if request in self.decoding or request in self.drafting:
            self.remove(request)
            self.prefilling.append(request)

    def sit(self, request: Request) -> None:
        """Let a request sit out."""
        if request not in self.sitting:
            departures = self.departures
            self.remove(request)
            self.departures = departures
            self.sitting.append(request)

    def sit_slow(self, requests: Collection[Request]) -> None:
        """Let those of the requests sit out that are slow and decode, and whose next token is being computed."""
        for request in requests:
            if request.is_slow and request.in_flight_tokens and request in self.decoding:
                self.sit(request)

    def stand(self, request: Request) -> None:
        """A request that sat out goes on."""
        self.sitting.remove(request)
        if request.caught_up:
            self.decoding.append(request)
            self._decodes = None
        else:
            self.prefilling.append(request)

    def end_decodes(self) -> None:
        """Move the decoding requests that have reached their limit, tokens in flight included, to `ending`."""
        self.ending += [r for r in self.decoding if r.total >= r.limit]
        self.decoding = [r for r in self.decoding if r.total < r.limit]
        self._decodes = None

    def sort_prefilling(self) -> None:
        """Move the requests that have caught up to `decoding`, or to `ending` if they have nothing more to compute."""
        still = []
        for request in self.prefilling:
            if request.uncomputed_tokens == 0 or (request.total >= request.limit and request.in_flight_tokens):
                self.ending.append(request)
            elif request.caught_up:
                self.decoding.append(request)
                self._decodes = None
            else:
                still.append(request)
        self.prefilling = still
