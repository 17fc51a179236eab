"""The text stage, event by event: what becomes of what the core says."""

from __future__ import annotations

import pytest
from sim_workers import ids, register

from radixrt.config import RouterConfig
from radixrt.messages import Abort, Deltas, Error, Generate, Load, Output, Sampling, StepDone, TokenPrompt
from radixrt.router.core.core import RouterCore
from radixrt.router.server.streams import TextStreams, core_streams
from radixrt.tokens import TextService, load_tokenizer
from tests.checkpoints import make_tokenizer

SAID = [40, 41, 42, 43, 44, 45]


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder)
    with TextService(load_tokenizer(folder)) as service:
        yield service


class Stage:
    """A core with one worker, and the text of one request of a client."""

    def __init__(self, service: TextService, **fields) -> None:
        self.core = RouterCore(RouterConfig())
        self.core.register(register("w0"), 0.0)
        self.streams = TextStreams(service, self.core)
        self.kept: list[tuple] = []
        self.sent: list = []
        self.orders: list = []
        sampling = Sampling(max_tokens=100, seed=3, stop=fields.pop("stop", ()))
        request = Generate(id=1, prompt=TokenPrompt(ids(5, 6)), sampling=sampling, **fields)
        wanted = Generate(id=1, prompt=request.prompt, sampling=sampling, n=request.n,
                          stream=core_streams(request, service))  # fmt: skip
        self.runs = [effect.message.id for effect in self.core.submit(b"c", wanted, 0.0)]
        self.streams.add(b"c", request, lambda whole: self.kept.append((whole.ids, whole.text, whole.stop)))

    def step(self, *outputs: Output) -> None:
        self.perform(self.core.step("w0", StepDone(list(outputs), Load()), 1.0))

    def perform(self, effects) -> None:
        """As the router's loop does it."""
        work = list(effects)
        while work:
            effect = work.pop(0)
            if not hasattr(effect, "client"):
                self.orders.append(effect.message)
            elif isinstance(effect.message, Deltas):
                decoded, orders = self.streams.decode(b"c", effect.message)
                work += orders
                self.sent += decoded.items
            else:
                self.streams.forget(b"c", 1)
                self.sent.append(effect.message)


def test_a_stop_string_in_the_step_that_fails_is_no_end(service):
    """What ends the request is its Error: nothing has ended well, and nothing is kept."""
    whole = service.tokenizer.decode(SAID)
    for n in (1, 2):
        stage = Stage(service, stop=(whole[-2:],), n=n)
        stage.step(*(Output(run, SAID[:2]) for run in stage.runs))
        stage.step(Output(stage.runs[0], SAID[2:]), Output(stage.runs[-1], finish="error", error="out of memory"))
        *deltas, error = stage.sent
        assert isinstance(error, Error) and not any(delta.finish for delta in deltas)
        assert not stage.kept and not stage.streams._texts and not stage.core.runs_in_flight


@pytest.mark.parametrize("stop", [(), ("nowhere",)])
@pytest.mark.parametrize("n", [1, 2])
def test_a_whole_answer_that_its_client_ends_has_its_text(service, stop, n):
    stage = Stage(service, stream=False, stop=stop, n=n)
    stage.step(Output(stage.runs[0], SAID[:4]))
    stage.step(Output(stage.runs[0], SAID[4:]))
    stage.perform(stage.core.end_choice(b"c", 1, 0))
    (delta,) = stage.sent
    assert (delta.ids, delta.text, delta.finish) == (ids(*SAID), service.tokenizer.decode(SAID), "stop")
    assert delta.usage.completion_tokens == len(SAID) and stage.orders == [Abort([stage.runs[0]])]
    assert stage.kept == [(delta.ids, delta.text, None)]
