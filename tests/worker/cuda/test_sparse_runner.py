"""The GPU's runner with indexers, in Triton's interpreter."""

from __future__ import annotations

import msgspec
import pytest
import torch
from torch.nn import functional as F

from radixrt.config import WorkerConfig, resolve
from radixrt.messages import Sampling
from radixrt.worker.load.cuda_runner import find_full_heads
from radixrt.worker.load.options import look_up
from radixrt.worker.plan import Plan
from tests.worker.cuda.test_runner import INDEXED, SIZES, runners
from tests.worker.engine import GREEDY, Engine, prompts
from tests.worker.families import make_model

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # exp overflows to infinity, as it should


@pytest.fixture(autouse=True)
def _interpreter(device):
    if device.type == "cuda":
        pytest.skip("for the interpreter")


def generating(count: int) -> Sampling:
    return msgspec.structs.replace(GREEDY, max_tokens=count)


def index_of(plan: Plan, id: int) -> int:
    return next(i for i, request in enumerate(plan.requests) if request.id == id)


@pytest.mark.usefixtures("steady_products")
@pytest.mark.slow
@pytest.mark.parametrize("page_size", [1, 4])
def test_exact_results_do_not_depend_on_the_batch(page_size, tmp_path, monkeypatch):
    """In one chunk, in many, in company and after a hit, to the last bit, if products are (here by one row at a
    time)."""

    def linear(x, w, b=None):
        return (torch.stack([w @ row for row in x]) if len(x) else x @ w.t()) + (0 if b is None else b)

    monkeypatch.setattr(F, "linear", linear)
    make_model(tmp_path, "deepseek_v32", **SIZES | INDEXED | {"index_topk": 12})
    prompt, *others = prompts(3, 40, 40, vocab_size=128)
    found = []
    for chunk, company in ((64, []), (9, []), (25, others), (64, [prompt[:20]])):
        _, runner = runners(tmp_path, page_size=page_size, exact=True)
        assert runner._attention.sparse.tiling.fixed == 12, "a query's keys are not divided"
        engine = Engine(runner, chunk=chunk, rows=8, max_model_len=64)
        engine.generate(company, generating(2))
        id = engine.add(prompt, generating(3))
        if company is others:
            engine.add(others[0][:30], generating(3))
        found.append([])
        while not engine.outputs[id] or not engine.last(id).finish:
            plan = engine.scheduler.plan()
            logits, at = runner.logits(plan), int(plan.wants[: index_of(plan, id)].sum())
            if plan.samples[index_of(plan, id)]:
                found[-1].append(logits[at])
            for output in engine.scheduler.apply(plan, runner.launch(plan)()):
                engine.outputs[output.id].append(output)
    for other in found[1:]:
        assert len(other) == len(found[0]) and all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_there_are_no_full_heads(tmp_path):
    """They would attend to all tokens."""
    make_model(tmp_path, "deepseek_v32", **SIZES | INDEXED)
    config = resolve(WorkerConfig(model=str(tmp_path), device="cpu"))
    assert find_full_heads(config, look_up(config)) is None
