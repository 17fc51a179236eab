"""Drafted tokens through the whole stack: the same answers in fewer steps."""

from __future__ import annotations

from typing import Any

from radixrt import Client, Sampling
from radixrt.client.local import LocalStack
from radixrt.config import FrontendConfig, RouterConfig, StackConfig, WorkerConfig, resolve
from radixrt.messages import Grammar
from radixrt.worker.execution.fake_runner import FakeRunner
from radixrt.worker.setup import make_drafter
from radixrt.worker.speculative.ngram import MAX_SPARSE_REQUESTS
from tests.checkpoints import make_tokenizer
from tests.worker.families import make_model
from tests.worker.multi_token import add_layer, make_markov

NOTES = "Here are the notes.\nThe access code of the old mill is 4817. The owner of the red tower is Mia Bren."
ASKED = "What is the access code of the old mill?"
SCHEMA = '{"type": "array", "items": {"type": "string"}, "minItems": 6}'
WAYS = {
    "several, drawn": {"max_tokens": 16, "ignore_eos": True, "temperature": 0.5, "seed": 7},
    "penalized a little": {"max_tokens": 24, "ignore_eos": True, "repetition_penalty": 1.01, "frequency_penalty": 0.01},
    "by a schema": {"max_tokens": 40, "grammar": Grammar("json_schema", SCHEMA)},
    "a stop string in the middle of what is repeated": {
        "max_tokens": 90,
        "ignore_eos": True,
        "logprobs": 1,
        "stop": ["tower?The o"],
    },
}


def answers(algorithm: str, model: str = "nano") -> tuple[list[Any], dict[str, Any]]:
    """(what is said in all ways, also as a stream where it is cut; the worker's counters)."""
    worker = resolve(WorkerConfig(model=model, device="cpu", speculative_algorithm=algorithm, check=True))
    stack = StackConfig(resolve(RouterConfig(model=model)), worker, resolve(FrontendConfig(model=model)))
    said = []
    with LocalStack(stack) as running, Client(running.address) as client:
        chat = [{"role": "system", "content": NOTES}, {"role": "user", "content": ASKED}]
        for how in WAYS.values():
            sampling = Sampling(**{"temperature": 0.0} | how)
            found = client.generate_n(chat, 2 if sampling.temperature else 1, sampling)
            said += [(one.text, one.ids, one.finish, one.stop, one.usage.completion_tokens) for one in found]
            for one in found:
                assert [each.token for each in one.logprobs or ()] == (one.token_ids if sampling.logprobs else [])
            if sampling.stop:
                assert "".join(delta.text for delta in client.stream(chat, sampling)) == found[0].text
        report = client.report()
    return [*said, report["total"]["generated_tokens"]], report["workers"][0]


def test_the_same_is_said_in_fewer_steps():
    """nano goes on to ask and answer itself, the same over and over."""
    plain, alone = answers("none")
    drafted, together = answers("ngram")
    assert drafted == plain
    assert alone["drafted_tokens"] == alone["accepted_tokens"] == 0
    assert together["drafted_tokens"] > together["accepted_tokens"] > 100
    assert together["steps"] < 0.6 * alone["steps"]


def test_a_model_s_own_layer_drafts(tmp_path):
    """Of a model that says a fixed token after each: all that it proposes is right."""
    made = make_model(tmp_path / "plain", "glm4_moe")
    add_layer(tmp_path / "plain", made, tmp_path / "model")
    make_markov(tmp_path / "model")
    make_tokenizer(tmp_path / "model")
    plain, alone = answers("none", str(tmp_path / "model"))
    drafted, together = answers("NEXTN", str(tmp_path / "model"))
    assert drafted == plain
    assert together["drafted_tokens"] >= together["accepted_tokens"] > 100
    assert together["steps"] < 0.5 * alone["steps"]


def test_settings_of_drafts():
    runner = FakeRunner()
    for name in ("mtp", "NEXTN", "nextn"):
        assert resolve(WorkerConfig(device="cpu", speculative_algorithm=name)).speculative_algorithm == "mtp"
    drafter = make_drafter(WorkerConfig(speculative_algorithm="mtp"), FakeRunner(truth=3))
    assert drafter is not None and drafter.predicts
    assert not make_drafter(WorkerConfig(speculative_algorithm="ngram"), runner).predicts
    assert resolve(WorkerConfig(device="cpu")).speculative_algorithm == "none"
    assert resolve(WorkerConfig(device="cpu", model="x.gguf")).speculative_algorithm == "ngram"
    assert resolve(WorkerConfig(device="cpu", model="x.gguf", quantization="none")).speculative_algorithm == "none"
    assert resolve(WorkerConfig(device="cuda")).speculative_algorithm == "auto", "it depends on the checkpoint"
    assert make_drafter(WorkerConfig(speculative_algorithm="auto"), runner) is not None
    assert resolve(WorkerConfig(device="cpu", speculative_algorithm="ngram")).speculative_algorithm == "ngram"
    assert make_drafter(WorkerConfig(speculative_algorithm="none"), runner) is None
    drafter = make_drafter(WorkerConfig(speculative_algorithm="ngram", speculative_num_draft_tokens=3), runner)
    assert drafter is not None and drafter.most == 3 and drafter.among > 1000
    runner.sparse = True
    assert make_drafter(WorkerConfig(speculative_algorithm="ngram"), runner).among == MAX_SPARSE_REQUESTS
