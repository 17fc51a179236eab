"""The live page's state: what each request in flight does."""

from __future__ import annotations

import pytest
from sim_workers import ids, register

from radixrt.config import RouterConfig
from radixrt.messages import Generate, Live, Load, Namespace, Output, Sampling, StepDone, Stored, TokenPrompt
from radixrt.report import Report
from radixrt.requests.validate import Refused
from radixrt.router.core.core import RouterCore
from radixrt.router.server import live
from radixrt.router.server.explain import Explainer
from radixrt.router.server.live import LiveView


def test_a_tenant_cannot_have_the_tree_drawn_all_the_time(monkeypatch):
    monkeypatch.setattr(live, "MAX_TENANT_SHARE", 1e-9)
    report = Report(10**6)
    core = RouterCore(RouterConfig(), report)
    core.register(register("w0"), 0.0)
    core.step("w0", StepDone([], Load(), 0, [Stored(Namespace("t").key, 1, 0, 0, 0, ids(1, 2, 3))]), 1.0)
    view = LiveView(core, report, Explainer(core, report, None), None)
    drawn = view.answer(Live(id=0, part="tree"), "t")
    assert view.answer(Live(id=0, part="tree"), "t") is drawn and drawn["total"] == 3
    with pytest.raises(Refused) as refused:
        view.answer(Live(id=0, part="tree", most=7), "t")
    assert refused.value.code == 429 and refused.value.retry_after > 0
    assert view.answer(Live(id=0, part="tree"), "other") == {"total": 0, "nodes": [], "tenants": []}


def test_a_request_waits_is_computed_and_decodes():
    report = Report(10**6)
    core = RouterCore(RouterConfig(), report)
    core.register(register("w0"), 0.0)
    view = LiveView(core, report, Explainer(core, report, None), None)

    def states() -> list[str]:
        return [run["state"] for run in view.answer(Live(id=0, part="state"), None)["requests"]]

    runs = []
    for i in range(4):
        sampling = Sampling(max_tokens=4)
        request = Generate(id=i, prompt=TokenPrompt(ids(i, 2, 3)), sampling=sampling, n=1)
        runs += [order.message.id for order in core.submit(b"c", request, 1.0)]
    assert states() == ["waiting"] * 4, "the worker has not got them yet"
    core.step("w0", StepDone([Output(runs[0], [7])], Load(running=2, waiting=1, newest_run=runs[2])), 2.0)
    assert states() == ["decode", "prefill", "waiting", "waiting"]
    core.step("w0", StepDone([Output(runs[0], [8], "length")], Load(running=3, newest_run=runs[3])), 3.0)
    assert states() == ["prefill"] * 3
    core.leave("w0", 4.0)
    assert states() == ["waiting"] * 3
    state = view.answer(Live(id=0, part="state"), None)
    assert [one["end"] for one in state["recent"]] == ["length"] and state["recent"][0]["generated"] == 2
    assert [one["text"] for one in state["failures"]] == ["has left"] and state["workers"] == []
    core.drop_client(b"c")
    recent = view.answer(Live(id=0, part="state"), None)["recent"]
    assert [one["end"] for one in recent] == ["cancelled"] * 3 + ["length"] and recent[0]["misses"] == {}
