"""Why a request missed what was computed before: evicted, or held by another worker."""

from __future__ import annotations

import pytest
from sim_workers import ids, register

from radixrt.config import RouterConfig
from radixrt.messages import Generate, Load, Origin, Output, Removed, Run, Sampling, StepDone, Stored, TokenPrompt
from radixrt.report import Report
from radixrt.router.core.core import RouterCore
from radixrt.router.server.explain import Explainer

PROMPT = ids(*range(100))
KEYS = ("t:kt", "u:ku")


class Rig:
    """A core with workers; time is that of the last call."""

    def __init__(self, *workers: str) -> None:
        self.now = 0.0
        self.report = Report(10**6, lambda: self.now)
        self.core = RouterCore(RouterConfig(api_key=KEYS), self.report)
        for name in workers:
            self.core.register(register(name), 0.0)
        self.seqs = dict.fromkeys(workers, 0)
        self._last = 0

    def send(self, now: float, prompt: bytes = PROMPT, key: str = "kt", program: str = "") -> tuple[str, Run]:
        self.now, self._last = now, self._last + 1
        sampling = Sampling(max_tokens=1)
        request = Generate(
            id=self._last, prompt=TokenPrompt(prompt), sampling=sampling, api_key=key, origin=Origin(program)
        )
        (order,) = self.core.submit(b"c", request, now)
        return order.name, order.message

    def step(self, now: float, name: str, *events, outputs=(), **load) -> None:
        self.now = now
        seq, self.seqs[name] = self.seqs[name], self.seqs[name] + len(events)
        self.core.step(name, StepDone(list(outputs), Load(**load), seq, list(events)), now)

    def end(self, now: float, name: str, run: Run, cached: int, *events) -> None:
        self.step(now, name, *events, outputs=[Output(run.id, [7], "length", cached)])

    def explained(self, tenant: str | None = None) -> dict:
        (one, *_) = self.report.recent.requests("t")
        return Explainer(self.core, self.report, None).explain(one, tenant)


def test_what_was_evicted_is_dated_and_has_a_cause():
    rig = Rig("w0")
    name, run = rig.send(10.0)
    rig.end(11.0, name, run, 0, Stored(run.namespace, 1, 0, 0, 0, PROMPT))
    assert rig.explained()["evicted"] is None and rig.explained()["misses"]["never_seen"] == 99
    rig.send(20.0, ids(*range(500, 600)), key="ku", program="the one that needs room")
    rig.step(21.0, "w0", Removed(1, 40))
    name, run = rig.send(26.0)
    rig.end(27.0, name, run, 40)
    told = rig.explained()
    assert told["evicted"] == {"tokens": 59, "seconds_ago": 5.0, "by": "the one that needs room"}
    assert told["diverged"] is None and told["misses"]["evicted"] == 59
    assert any("59 tokens" in said and "about 5 s" in said and "needs room" in said for said in told["sentences"])
    assert rig.explained("t")["evicted"]["by"] == "another tenant"
    assert "needs room" not in str(rig.explained("t"))


def test_an_eviction_that_is_not_known_is_not_guessed():
    rig = Rig("w0")
    name, run = rig.send(10.0)
    rig.end(11.0, name, run, 0)  # it was never in the index
    name, run = rig.send(20.0)
    rig.end(21.0, name, run, 0)
    assert rig.explained()["evicted"] == {"tokens": 99, "seconds_ago": None, "by": ""}


def test_what_another_worker_holds_is_named():
    rig = Rig("w0", "w1")
    name, run = rig.send(10.0)
    rig.end(11.0, name, run, 0, Stored(run.namespace, 1, 0, 0, 0, PROMPT))
    other = {"w0": "w1", "w1": "w0"}[name]
    for worker in (name, other):  # the one with the prefix has much to do
        rig.step(12.0, worker, queued_tokens=10**6 * (worker == name), prefill_rate=1000.0, step_seconds=0.01)
    chosen, run = rig.send(12.1)
    assert chosen == other
    rig.end(13.0, chosen, run, 0)
    told = rig.explained()
    assert told["elsewhere"] == {"tokens": 99, "worker": name} and told["worker"] == other
    assert any(name in said for said in told["sentences"])


@pytest.mark.parametrize("parts", [True, False])
def test_what_is_new_parts_from_another_prompt_or_follows_it(parts):
    rig = Rig("w0")
    first, run = rig.send(10.0)
    rig.end(11.0, first, run, 0, Stored(run.namespace, 1, 0, 0, 0, PROMPT))
    name, run = rig.send(12.0, (PROMPT[:-80] if parts else PROMPT) + ids(*range(900, 940)))
    rig.end(13.0, name, run, 80 if parts else 100)
    told = rig.explained()
    assert told["bound"] == (80 if parts else 100) and told["misses"]["never_seen"] == 39
    assert (told["diverged"] and told["diverged"]["token"]) == (80 if parts else None)
    assert any("differs" in said for said in told["sentences"]) == parts
