"""A scheduler and a runner without a router and a worker's loop; the page accounting is checked after each step."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from radixrt.messages import Output, Run, Sampling
from radixrt.worker.cache.page_cache import PageCache
from radixrt.worker.plan import Plan, Runner, SampleInputs
from radixrt.worker.request import Request
from radixrt.worker.scheduler.sample_inputs import InputGatherer
from radixrt.worker.scheduler.scheduler import Limits, Scheduler
from radixrt.worker.speculative.ngram import Drafter

GREEDY = Sampling(max_tokens=64, temperature=0.0, ignore_eos=True)


class Clock:
    """A replacement for the module `time`."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


def draw(scheduler: Scheduler, runner: Runner, plan: Plan) -> None:
    """As the worker's loop, once a step is launched and the one before is applied."""
    if plan.needs_host_tokens:
        runner.sample_deferred(scheduler.sample_inputs(plan, runner.mask_room))


def sample_inputs(plan: Plan, requests: Sequence[Request]) -> SampleInputs:
    """The inputs of a plan whose requests gave nothing to a runner before."""
    return InputGatherer().gather(plan, requests, lambda count: np.zeros((count, 1), dtype=np.int32))


class Engine:
    """`chunk` is the token budget of a step, `rows` the most running requests."""

    def __init__(
        self, runner: Runner, *, chunk: int = 512, rows: int = 64, max_model_len: int = 1024,
        drafter: Drafter | None = None,
    ) -> None:  # fmt: skip
        self.runner = runner
        self.cache = PageCache(
            runner.num_pages, runner.page_size, rows, max_model_len, num_states=runner.num_states,
            num_host_pages=runner.num_host_pages, num_host_states=runner.num_host_states, disk=runner.disk,
        )  # fmt: skip
        self.scheduler = Scheduler(self.cache, Limits(chunk, rows), drafter, runner.shares)
        self.max_model_len = max_model_len
        self.outputs: dict[int, list[Output]] = {}
        self._next = 0
        self._inflight = None
        runner.bind(self.cache.requests.table)
        runner.audit(self.scheduler.histories)

    def add(
        self,
        prompt: Sequence[int],
        sampling: Sampling = GREEDY,
        *,
        score_from: int | None = None,
        prompt_len: int | None = None,
        namespace: str = "",
        adapter: int = -1,
    ) -> int:
        self._next += 1
        ids, size = array("i", prompt).tobytes(), len(prompt) if prompt_len is None else prompt_len
        run = Run(
            id=self._next, namespace=namespace, ids=ids, prompt_len=size, sampling=sampling, score_from=score_from
        )
        limit = min(
            size + (self.max_model_len if sampling.max_tokens is None else sampling.max_tokens), self.max_model_len
        )
        request = Request(run, max(limit, len(prompt)), self.runner.eos_ids, adapter)
        self.prepare(request)
        self.scheduler.add(request)
        self.outputs[run.id] = []
        return run.id

    def prepare(self, request: Request) -> None:
        """Called before a request is scheduled; for subclasses."""

    def step(self) -> bool:
        """Run one step as the worker's loop does. Returns False if there is nothing left to do."""
        for output in self.scheduler.settle():
            self.outputs[output.id].append(output)
        plan = self.scheduler.plan()
        launched = (plan, self.runner.launch(plan)) if plan else None
        self.finish_step()
        self._inflight = launched
        if plan:
            draw(self.scheduler, self.runner, plan)
        if not self.runner.overlaps:
            self.finish_step()
        self.cache.check()
        return plan is not None or self.scheduler.has_work

    def finish_step(self) -> None:
        """Apply the result of the step in flight, if there is one."""
        if self._inflight is not None:
            plan, wait = self._inflight
            self._inflight = None
            for output in self.scheduler.apply(plan, wait()):
                self.outputs[output.id].append(output)

    def finish(self) -> None:
        while self.step():
            pass

    def tokens(self, id: int) -> list[int]:
        return [token for output in self.outputs[id] for token in output.tokens]

    def last(self, id: int) -> Output:
        return self.outputs[id][-1]

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling = GREEDY) -> list[list[int]]:
        ids = [self.add(prompt, sampling) for prompt in prompts]
        self.finish()
        return [self.tokens(id) for id in ids]


def prompts(count: int, shortest: int, longest: int, vocab_size: int = 512, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, vocab_size, rng.integers(shortest, longest + 1)).tolist() for _ in range(count)]
