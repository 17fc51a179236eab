"""Decides which tokens each step computes. A request has `computed` and `total` tokens, and the scheduler lets the one
catch up with the other within a token budget per step. There are no prefill and decode phases: cache hits, chunked
prefill, decoding and resumption after a preemption all work this way.

    waiting --admit--> prefilling (chunks) --> decoding (one token a step) --> done
       ^                  |                    |
       +-----preempt------+--------------------+          what was computed stays in the tree

Of the waiting requests, the one with the fewest uncached tokens comes first, and at times the oldest: see `queue`.

Counts advance when a step is planned; token ids arrive when its result is applied. So step n+1 can be planned while
step n runs: the sampled tokens that it needs are on the device.

    overlapped:      plan n   plan n+1   apply n   plan n+2   apply n+1
                              tokens in flight are sampled but not known to the host; the plan has FROM_DEVICE for them
    not overlapped:  plan n   apply n   plan n+1   apply n+1

A grammar may force tokens after a sampled one: the request is then behind by these, and computes them as a chunk. If it
takes long to tell which tokens a grammar allows, steps go on without the request (`structured.sit_out`).
Tokens may be drafted (`ngram`): the request then gains one or several tokens per step, and is planned again when
they are known.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from radixrt.messages import Output, TokenLogprob
from radixrt.worker.cache.page_cache import PageCache
from radixrt.worker.cache.page_pool import OutOfPages
from radixrt.worker.plan import Draft, MaskRoom, Plan, Result, SampleInputs, moves_alone
from radixrt.worker.request import Request, advance
from radixrt.worker.scheduler.admission import Admission
from radixrt.worker.scheduler.fetching import Fetching
from radixrt.worker.scheduler.finish import Ending
from radixrt.worker.scheduler.plan_builder import Decodes, StepBuilder
from radixrt.worker.scheduler.queue import Arrivals, VirtualTokenCounter, Waiting
from radixrt.worker.scheduler.running import Running
from radixrt.worker.scheduler.sample_inputs import InputGatherer
from radixrt.worker.scheduler.state_checkpoints import Branching, NoBranching, until_checkpoint
from radixrt.worker.speculative.ngram import Drafter, should_wait
from radixrt.worker.speculative.speculation import Speculation
from radixrt.worker.structured.masks import jump_all
from radixrt.worker.structured.sit_out import Sitting
from radixrt.worker.stuck import Stuck, StuckCause

FETCHED = 16
"""So many tokens are copied from host memory in the time of computing one, or more."""
MIN_FETCHED_TOKENS, MAX_OTHER_TOKENS = 512, 2048
"""If many tokens of a request are copied from host memory, and the step has other work but computes few prompt tokens,
the request's chunk comes in the next step: this one need not wait for the copy."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The most tokens of a step, and the most running requests."""

    max_num_batched_tokens: int
    max_num_seqs: int


Grown = tuple[Request, list[TokenLogprob | None]]
"""A request that has gained a token, and the log-probabilities to report with it."""


class Scheduler:
    """Turns requests into plans, and results into outputs. With a `drafter`, some tokens are drafted. `paths`: whether
    the runner `shares`."""

    def __init__(self, cache: PageCache, limits: Limits, drafter: Drafter | None = None, paths: bool = False) -> None:
        self.cache = cache
        self.limits = limits
        self.drafter = drafter
        self.running = Running()
        self.preemptions = 0
        self.forced_tokens = 0
        self.steps = 0
        self._with_paths = paths
        self._requests: dict[int, Request] = {}
        self._planned: dict[int, tuple[Request, ...]] = {}
        """By number of each step that is not applied yet: the requests of its plan."""
        self._inputs = InputGatherer()
        self._counter = VirtualTokenCounter()
        self._waiting = Waiting(cache, self._counter)
        self._branching = Branching(self.running, self._waiting, cache) if cache.has_states else NoBranching()
        self._admission = Admission(cache, self.running, self._waiting, self._counter, self._branching)
        self._ending = Ending(self._requests, cache, self.running, self._waiting, self._counter)
        self._speculation = Speculation(cache, self.running, limits.max_num_batched_tokens)
        self._sitting = Sitting(cache, self.running, self._waiting)
        self._fetching = Fetching(cache, self._waiting)
        self._slow: set[Request] = set()
        """The requests that had a mask that was late or slow."""
        self._nothing_planned = False
        self._arrivals = Arrivals()
        self._clock = 0

    # ------------------------------------------------------------ requests come and go

    def add(self, request: Request) -> None:
        """Add a new request to the queue. Raises ValueError if it could never fit or its id is taken."""
        room = self.cache.total_pages * self.cache.page_size
        if request.id in self._requests:
            raise ValueError(f"id: request {request.id} exists")
        if request.limit > room:
            raise ValueError(f"prompt: {request.limit} tokens do not fit the {room} of the pool")
        self._requests[request.id] = request
        self._arrivals.record(request, self._clock)
        parked = request.matcher is not None and not self._begin_text(request)
        self._counter.add_request(request.tenant)
        self.cache.retained.arrived(request)
        if self.cache.order is not None and request.score_from is None:
            self.cache.order.arrived(request.id, request.namespace, request.tokens, time.monotonic())
        if parked:
            self._waiting.park(request)
            self._sitting.begin(request, jump=not request.generated)
        elif not self._fetching.begin(request):
            self._waiting.add(request)
        self._branching.arrived(request)

    def abort(self, id: int) -> bool:
        """End a request, waiting or running; what it computed stays cached. False if there is no such request."""
        request = self._requests.get(id)
        if request is None:
            return False
        self._ending.end(request)
        return True

    def requests_of(self, plan: Plan) -> tuple[Request, ...]:
        """The requests of a plan whose result is not applied yet."""
        return self._planned[plan.step]

    def histories(self, plan: Plan) -> list[tuple[Sequence[int], bool]]:
        """(its known tokens, whether it has ended) of each request of a plan whose result is not applied yet."""
        return [(request.tokens, request.finished) for request in self._planned[plan.step]]

    def sample_inputs(self, plan: Plan, mask_room: MaskRoom) -> SampleInputs:
        """What the sampling of a plan that `needs_host_tokens` depends on, once the step before is applied."""
        return self._inputs.gather(plan, self._planned[plan.step], mask_room)

    @property
    def ids(self) -> list[int]:
        """Ids of all requests."""
        return list(self._requests)

    def has_requests(self, tenant: str) -> bool:
        """Whether a tenant has requests here, waiting or running."""
        return self._counter.has(tenant)

    @property
    def adapters(self) -> set[int]:
        """The numbers of the LoRA adapters that requests have; -1 for none."""
        return {request.adapter for request in self._requests.values()}

    def take_began(self) -> list[tuple[int, float]]:
        """(id, seconds that it waited) of the requests that were admitted since the last call, each once."""
        began, self._admission.began = self._admission.began, []
        return began

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._waiting.parked)

    @property
    def num_running(self) -> int:
        return len(self.running)

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    @property
    def all_sit_out(self) -> bool:
        """Whether the last `plan` found nothing to compute until a request's mask, or what it waits for of the disk, is
        there."""
        return len(self._sitting) + len(self._fetching) > 0 and self._nothing_planned

    @property
    def queued_tokens(self) -> int:
        """Tokens to compute until all requests decode: those of waiting requests and of running ones that are
        behind."""
        parked = sum(r.total for r in self._waiting.parked.values())
        return self._waiting.tokens + parked + sum(r.uncomputed_tokens for r in self.running.prefilling)

    # ------------------------------------------------------------ plan

    def plan(self) -> Plan | None:
        """Plan the next step; None if there is nothing to compute or the result of the step before has to be applied
        first. Allocates pages, and inserts the prompt tokens of the step into the tree."""
        running = self.running
        self._nothing_planned = False
        if retained := self.cache.retained:
            retained.expire() if self._waiting else retained.clear()
        if running.drafting and should_wait(sum(r.in_flight_tokens > 0 for r in running.drafting), running.generating):
            return None
        proposes = self._speculation.proposes(self.drafter) if self.drafter is not None else 0
        prompts = bool(running.prefilling or self._waiting)
        drafts = []
        if self.drafter is not None and running.drafting:
            drafts = self._speculation.plan(self.drafter, proposes, prompts)
        proposes = self._reserve_decodes(proposes)
        if running.sitting and self._waiting and not self.cache.requests.has_row:
            self._make_way()
        builder = StepBuilder(self.cache, self._with_paths)
        for drafting, ids, states, more in drafts:
            if drafting.row >= 0:
                builder.add_draft(drafting, ids, states, more)
        budget = self.limits.max_num_batched_tokens - len(running.decoding) - len(builder.requests)
        self._admission.begin(running.prefilling, budget)
        while budget > 0 and (request := self._admission.next(self.steps)):
            taken = self._chunk(request, budget, builder, proposes)
            self._counter.count_prompt(request.tenant, taken)
            budget -= taken
        if not running.decoding and not builder.requests:
            self._nothing_planned = not (self._waiting and self._make_way())
            return self._moves_alone()
        self.steps += 1
        decodes = running.decodes()
        plan = builder.build(self.steps, decodes, proposes)
        self._planned[self.steps] = (*decodes.requests, *builder.requests) if builder.requests else decodes.requests
        self._clock += len(plan.tokens)
        self._advance(decodes, builder)
        if self._slow:
            self.running.sit_slow(self._slow)
        return plan

    def _moves_alone(self) -> Plan | None:
        """A step without requests, if there are pages to be copied to the device: what is prefetched does not wait for
        a request."""
        if not self.cache.tier.is_onloading or (moves := self.cache.tier.drain()) is None:
            return None
        self.steps += 1
        self._planned[self.steps] = ()
        return moves_alone(self.steps, moves, self.cache.requests.drain_writes())

    def _advance(self, decodes: Decodes, builder: StepBuilder) -> None:
        """Count the planned tokens as computed, and the tokens sampled from them as pending."""
        decodes.advance()
        if self._counter.several:
            for request in self.running.decoding:
                self._counter.count_decoded(request.tenant)
        if advance(self.running.decoding):
            self.running.end_decodes()
        if builder.requests:
            self._advance_others(builder)

    def _advance_others(self, builder: StepBuilder) -> None:
        """As `_advance`, for requests with drafts and for chunks. Of a draft only the last known token counts as
        computed; drafted tokens count once they are accepted."""
        for draft in builder.drafts:
            request = builder.requests[draft.first]
            request.plan(1, 1)
            if self._counter.several:
                self._counter.count_decoded(request.tenant)
        first = sum(1 + len(draft.ids) for draft in builder.drafts)
        chunks = (entries[first:] for entries in (builder.requests, builder.counts, builder.samples))
        for request, count, samples in zip(*chunks, strict=True):
            request.plan(count, samples)
        self.running.sort_prefilling()

    def _reserve_decodes(self, proposes: int) -> int:
        """Reserve pages for the decodes, and for up to `proposes` proposals of each. Returns how many of these there
        is room for: all or none."""
        while self.running.decoding:
            decodes = self.running.decodes()
            try:
                if proposes:
                    self.cache.requests.reserve_up_to(decodes.rows, decodes.positions + decodes.proposes(proposes))
                else:
                    self.cache.requests.reserve_next(decodes.rows, decodes.positions)
                break
            except OutOfPages:
                if not proposes:
                    self._preempt()
                proposes = 0
        return proposes

    def _preempt(self, planned: Sequence[Request] = ()) -> Request:
        """Move the youngest running request that is not `planned` for this step back to the queue, and return it."""
        return self._put_back(self.running.youngest(planned))

    def _make_way(self) -> bool:
        """Park a request that sits out, with its row and pages, for one that waits; False if there is none."""
        sitting = [request for request in self.running.sitting if not request.in_flight_tokens]
        if sitting:
            self._put_back(max(sitting, key=lambda request: request.age))
        return bool(sitting)

    def _put_back(self, victim: Request) -> Request:
        sits = victim in self.running.sitting and not victim.in_flight_tokens
        self.running.remove(victim)
        self.cache.requests.retire(victim)
        if sits:
            self._waiting.park(victim)
        else:
            self._waiting.add(victim)
        self.preemptions += 1
        return victim

    def _chunk(self, request: Request, budget: int, builder: StepBuilder, proposes: int = 0) -> int:
        """Plan the next chunk of a request that is prefilling, with up to `proposes` proposals if it is the last one.
        Returns how much of the budget it takes."""
        fetched = 0
        while True:
            # Repeated after each preemption: the victim's pages, now in the tree, may be what this request needs next.
            self.cache.requests.catch_up(request)
            try:
                fetched += self.cache.requests.onload(request)
                if (
                    fetched >= MIN_FETCHED_TOKENS
                    and (self.running.decoding or builder.requests)
                    and sum(builder.counts) < MAX_OTHER_TOKENS
                ):
                    return fetched // FETCHED
                count = min(max(1, budget - fetched // FETCHED), builder.max_count(request))
                if request.checkpoints:
                    count = until_checkpoint(request, count)
                if not count:  # the step scores MAX_SCORED_TOKENS tokens already
                    return fetched // FETCHED
                self.cache.requests.reserve(request, request.computed + count)
                break
            except OutOfPages:
                if self._preempt(builder.requests) is request:
                    return fetched // FETCHED
        stop = request.computed + count
        request.reach(request.computed, stop)
        builder.add(request, count, self._speculation.reserve_proposals(request, stop, proposes) if proposes else 0)
        return fetched // FETCHED + count

    # ------------------------------------------------------------ apply

    def apply(self, plan: Plan, result: Result) -> list[Output]:
        """Apply the result of a step, in the order of plans. Returns the new tokens of each request."""
        requests = self._planned.pop(plan.step)
        self.cache.tier.applied()
        outputs: list[Output] = []
        grown: list[Grown] = []
        failed, stuck, scores, logprobs = result.failed, result.stuck, result.scores, result.logprobs
        drafted = plan.drafted if plan.drafts else None
        for index, (request, token, samples) in enumerate(
            zip(requests, result.tokens, plan.samples.tolist(), strict=True)
        ):
            if drafted is not None and index in drafted:
                continue
            if failed and index in failed:
                outputs += self._ending.fail_for_good(request, failed[index])
                continue
            if request.finished or plan.step <= request.discard_until:
                continue  # it has ended, or its grammar forced other tokens
            if stuck and index in stuck:
                outputs += self._cannot_go_on(request, stuck[index])
                continue
            if scores and index in scores and request.scores is not None:
                stop = int(plan.starts[index] + plan.counts[index])
                request.scores.add(stop - int(plan.wants[index]) + 1, scores[index])
            if samples:
                theirs = logprobs[index : index + 1] if logprobs else logprobs
                self._append_sampled(request, token, theirs, outputs, grown)
            elif plan.starts[index] + plan.counts[index] == request.total:
                output = Output(request.id, request.take_unreported(), finish="length")
                if request.scores is not None:
                    request.scores.report(output)
                self._finish(request, output, outputs)
        for draft in plan.drafts:
            self._verify(requests[draft.first], draft, result, outputs, grown)
        if grown:
            self._jump(grown, outputs)
        if result.proposals and self.drafter is not None:
            self._speculation.take_proposals(self.drafter, plan, requests, result)
        self.running.set_sampled(result.tokens)
        if self.drafter is not None:
            self._speculation.begin(self.drafter)
        return outputs

    def _verify(
        self, request: Request, draft: Draft, result: Result, outputs: list[Output], grown: list[Grown]
    ) -> None:
        """Accept the right tokens of a request's draft, and the sampled token after them."""
        first = draft.first
        if first in result.failed:
            outputs += self._ending.fail_for_good(request, result.failed[first])
            return
        if request.finished:
            return
        if first in result.stuck:
            outputs += self._cannot_go_on(request, result.stuck[first])
            return
        assert self.drafter is not None
        accepted = self._speculation.verify(self.drafter, request, draft, result)
        if self._counter.several:
            self._counter.count_decoded(request.tenant, accepted)
        if request.row < 0:  # it was preempted meanwhile, and waits with more tokens than it had
            self._waiting.tokens += accepted
        self._append_sampled(
            request, result.tokens[first + accepted], result.logprobs[first : first + accepted + 1], outputs, grown
        )

    def _append_sampled(
        self, request: Request, token: int, logprobs: list[TokenLogprob | None], outputs: list[Output],
        grown: list[Grown],
    ) -> None:  # fmt: skip
        """Append a sampled token to a request and report it; with a grammar, add the request to `grown` instead, unless
        it has ended. `logprobs`, if requested, are those of all tokens that were not reported yet."""
        tokens = request.tokens
        request.append(token)
        if request.row < 0:  # preempted while this token was in flight
            self._waiting.note_gain(request)
        stops = token in request.stop_ids
        if request.matcher is not None and not stops and len(tokens) < request.limit:
            grown.append((request, logprobs))
            return
        output = Output(request.id, request.take_unreported(), None, request.cached_tokens)
        if request.sampling.logprobs is not None and logprobs:
            output.logprobs = [one for one in logprobs if one is not None]
        if request.scores is not None:
            request.scores.report(output)
        if stops:
            output.finish, output.stop = "stop", token
            self._finish(request, output, outputs)
        elif len(tokens) >= request.limit:
            output.finish = "length"
            self._finish(request, output, outputs)
        else:
            outputs.append(output)

    # ------------------------------------------------------------ grammars

    def _begin_text(self, request: Request) -> bool:
        """Append the tokens that the grammar of a new request forces first. False if they are not known in time."""
        self._sitting.arrived(request)
        if request.generated:
            return True
        forced = jump_all([request])[0]
        if forced is None:
            self._slow.add(request)
            return False
        self._force(request, forced)
        return True

    def _force(self, request: Request, forced: Sequence[int]) -> None:
        request.extend(forced)
        self.forced_tokens += len(forced)

    def _jump(self, grown: list[Grown], outputs: list[Output]) -> None:
        """Report requests with a grammar that have gained a token, and append the tokens that their grammars force
        next. The token that the step in flight samples for such a request is then discarded: the first forced token
        takes its place. Requests sit out if it takes long to tell what is forced."""
        jumps = jump_all([request for request, _ in grown])
        for (request, logprobs), forced in zip(grown, jumps, strict=True):
            if forced:
                self._force(request, forced)
                if request.row < 0:  # it was preempted meanwhile, and waits with more tokens than it had
                    self._waiting.tokens += len(forced)
                request.discard_in_flight(self.steps)
            if forced is None and request.matcher is not None and request.matcher.may_jump(request):
                # Not reported yet: another worker that went on from here would not append what is forced.
                self._slow.add(request)
                self._sitting.sit(request, self.steps, jump=True)
                continue
            output = Output(request.id, request.take_unreported(), None, request.cached_tokens)
            if request.sampling.logprobs is not None and logprobs:
                output.logprobs = [one for one in logprobs if one is not None]
            if request.scores is not None:
                request.scores.report(output)
            if len(request.tokens) >= request.limit:
                output.finish = "length"
                self._finish(request, output, outputs)
                continue
            outputs.append(output)
            if forced is None or request.is_slow:
                self._slow.add(request)
            if forced is None:
                self._sitting.sit(request, self.steps, jump=True)
            if forced:
                self.running.catch_up(request)
        if self._slow:
            self.running.sit_slow(self._slow)

    def _cannot_go_on(self, request: Request, stuck: Stuck) -> list[Output]:
        """A step could not sample a token for a request: it sits out if its mask is late, and fails otherwise."""
        if stuck.cause is not StuckCause.LATE:
            return [self._ending.stop_short(request, stuck)]
        self._slow.add(request)
        self._sitting.sit(request, self.steps, jump=False)
        return []

    def settle(self) -> list[Output]:
        """Let the requests that sat out go on whose mask is there now, and those queue that have what they wait for.
        Returns what was not reported yet of the former, and the failures of those that cannot go on, or that take too
        long. To be called before `plan`."""
        outputs: list[Output] = []
        self.cache.tier.poll()
        self._fetching.settle()
        if not self._slow:
            return outputs
        self._slow = {request for request in self._slow if not request.finished}
        for request, problem in self._sitting.ready():
            if problem:
                outputs.append(self._ending.stop_short(request, problem))
                continue
            assert request.matcher is not None
            forced, request.matcher.forced = request.matcher.forced, ()
            withheld = len(request.tokens) > request.reported
            self._force(request, forced)
            if withheld:
                outputs.append(Output(request.id, request.take_unreported(), None, request.cached_tokens))
            self._sitting.back(request)
        return outputs

    def _finish(self, request: Request, output: Output, outputs: list[Output]) -> None:
        output.cached_tokens = request.cached_tokens
        outputs.append(output)
        if self.drafter is not None:
            self.drafter.ends(request)
        # The last token is never cached, even if the step in flight computes it; unless the model has recurrent states,
        # as they are then the ones after that token.
        if output.tokens and not self.cache.has_states:
            request.recompute_last()
        self._ending.end(
            request,
            why=output.finish or "stop",
            keep=self.cache.keeps and bool(self._waiting) and request.score_from is None,
        )

    def fail(self, plan: Plan, reason: str) -> list[Output]:
        """Fail every request of a step that could not be run. Nothing that the step was to compute stays cached."""
        return self._ending.fail_step(plan, self._planned.pop(plan.step), reason)
