"""The layer for multi-token prediction: it computes what the reference does, and what it proposes changes no text."""

from __future__ import annotations

import dataclasses
import json
import shutil

import pytest
import torch

from radixrt.config import WorkerConfig
from radixrt.messages import Sampling
from radixrt.worker.load.options import predicts
from radixrt.worker.model.predictor import has_predictor
from radixrt.worker.model.weights.checkpoint import read_json
from radixrt.worker.speculative.ngram import Drafter
from tests.worker.engine import GREEDY, Engine, prompts
from tests.worker.multi_token import FAMILIES, add_layer, make_markov
from tests.worker.test_models import load

COUNT = 3


@pytest.fixture(scope="module")
def made(checkpoint, tmp_path_factory):
    """A function from a family to (folder, reference), cached."""
    found = {}

    def make(family: str):
        if family not in found:
            folder = tmp_path_factory.mktemp("mtp") / family
            found[family] = folder, add_layer(*checkpoint(family), folder)
        return found[family]

    return make


def load_with(folder, **settings):
    return load(folder, speculative_algorithm="mtp", **settings)


class Always(Drafter):
    """Drafts all proposals, and nothing that is looked up. `took` has (tokens of a request, its proposals)."""

    def __init__(self, runner, count: int = COUNT) -> None:
        super().__init__(count, runner.overlaps, predicts=True)
        self.took: list[tuple[list[int], list[int]]] = []

    def proposes(self, requests) -> int:
        return self.most

    def begins(self, request, requests: int) -> bool:
        return request.total + 2 <= request.limit

    def draft(self, request, most: int, requests: int) -> list[int]:
        proposals = self._draft_state(request).proposals
        self._draft_state(request).proposed = True
        if proposals.length != len(request.tokens):
            return []
        return proposals.ids[: min(most, request.limit - len(request.tokens) - 1)]

    def proposed(self, request, length: int, ids: list[int]) -> None:
        super().proposed(request, length, ids)
        assert length == len(request.tokens)
        self.took.append((request.tokens.tolist(), ids))


@pytest.mark.parametrize("family", FAMILIES)
def test_as_the_reference(made, family):
    folder, reference = made(family)
    model = load_with(folder)._model
    (tokens,) = prompts(1, 40, 40)
    hidden = reference.states(tokens)
    before = torch.cat((torch.zeros_like(hidden[:1]), hidden[:-1]))
    expected, _ = reference.logits(tokens, before)

    from radixrt.worker.load.kv_scales import _Observer

    with torch.inference_mode():
        ids, positions = torch.tensor(tokens), torch.arange(len(tokens))
        found = model.logits(model.predictor.guess(ids, positions, before, _Observer(model)))
    assert (found - expected).abs().max() < 2e-3 * expected.abs().max()
    assert (found.argmax(-1) == expected.argmax(-1)).all()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chunk", [512, 16])
def test_proposals_are_the_reference_s(made, family, chunk):
    """Of prompts in one chunk or several, and after each step with a draft, whatever of it was right."""
    folder, reference = made(family)
    runner = load_with(folder)
    drafter = Always(runner)
    engine = Engine(runner, chunk=chunk, drafter=drafter)
    engine.generate(prompts(2, 30, 50), Sampling(max_tokens=14, temperature=0.0, ignore_eos=True))
    assert len(drafter.took) > 8
    for tokens, ids in drafter.took:
        assert ids == reference.propose(tokens, COUNT)[: len(ids)]
    assert sum(len(ids) == COUNT for _, ids in drafter.took) > 8


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_hit_leaves_one_state_unknown(made, page_size):
    """What a request computes of the layer is read by those that hit it."""
    folder, reference = made("glm4_moe")
    runner = load_with(folder, page_size=page_size)
    drafter = Always(runner)
    engine, (prompt, other) = Engine(runner, drafter=drafter), prompts(2, 40, 40)
    one = Sampling(max_tokens=5, temperature=0.0, ignore_eos=True)
    engine.generate([prompt], one)
    drafter.took.clear()
    id = engine.add(prompt[:32] + other[:10], one)
    engine.finish()
    assert engine.last(id).cached_tokens == 32
    for tokens, ids in drafter.took:
        assert ids == reference.propose(tokens, COUNT, (0, 32))[: len(ids)]


WAYS = {
    "greedy": {},
    "drawn": {"temperature": 1.0, "seed": 3},
    "penalized": {"repetition_penalty": 1.2, "frequency_penalty": 0.3},
    "with log-probabilities": {"logprobs": 2},
}


@pytest.mark.parametrize(
    ("family", "way"),
    [
        ("deepseek_v3", "penalized"),
        *(pytest.param("deepseek_v3", way, marks=pytest.mark.slow) for way in WAYS if way != "penalized"),
        *(pytest.param("qwen3_next", way, marks=pytest.mark.slow) for way in WAYS),
    ],
)
def test_the_text_is_the_same(made, family, way):
    """Alone and together, cold and warm, in chunks, with few pages."""
    folder, _ = made(family)
    sampling = Sampling(**{"max_tokens": 16, "temperature": 0.0, "ignore_eos": True} | WAYS[way])
    asked = prompts(5, 20, 60)
    asked[1] = asked[0][:15] + asked[1]
    plain = load(folder)
    expected = [Engine(plain).generate([prompt], sampling)[0] for prompt in asked]
    for settings, sizes in (({}, {}), ({"page_size": 4}, {"chunk": 16}), ({"max_total_tokens": 170}, {"rows": 4})):
        runner = load_with(folder, **settings)
        drafter = Always(runner)
        engine = Engine(runner, drafter=drafter, **sizes)
        for _ in range(2):
            assert engine.generate(asked, sampling) == expected
        assert [engine.generate([prompt], sampling)[0] for prompt in asked] == expected
        assert drafter.drafted > 40
        if "max_total_tokens" in settings:
            assert engine.scheduler.preemptions or engine.cache.evicted_tokens


def test_in_fp8_pages(made):
    """The layer's scales are calibrated as those of others are; results stay exact."""
    folder, _ = made("glm4_moe")
    asked = prompts(4, 20, 60)
    expected = Engine(load(folder, kv_cache_dtype="fp8_e4m3")).generate(asked)
    runner = load_with(folder, kv_cache_dtype="fp8_e4m3")
    assert len(runner.pool.scales) == 3 and runner.pool.scales[2] != (1.0, 1.0)
    assert Engine(runner, drafter=Always(runner)).generate(asked) == expected


def test_a_layer_that_predicts_well_saves_steps(made, tmp_path):
    """A decoder whose next token is a function of the last one, and a layer that computes the same from its token."""
    source, _ = made("glm4_moe")
    shutil.copytree(source, tmp_path / "model")
    make_markov(tmp_path / "model")
    asked = prompts(4, 20, 40)
    counts = []
    for algorithm in ("none", "mtp"):
        runner = load(tmp_path / "model", speculative_algorithm=algorithm)
        drafter = None if algorithm == "none" else Drafter(8, runner.overlaps, predicts=True)
        engine = Engine(runner, drafter=drafter)
        said = engine.generate(asked, GREEDY)
        counts.append((said, engine.scheduler.steps))
    assert counts[0][0] == counts[1][0] and len({tuple(text) for text in counts[0][0]}) == 4
    assert drafter.accepted > 0.95 * drafter.drafted > 100
    assert counts[1][1] < 0.3 * counts[0][1]


def test_what_is_not_served_is_named(made, checkpoint, tmp_path):
    folder, _ = made("deepseek_v3")
    assert not load(folder).predicts and load_with(folder).predicts
    with pytest.raises(ValueError, match="no multi-token prediction is served for models of type llama"):
        load_with(checkpoint("llama")[0])
    with pytest.raises(ValueError, match="speculative_algorithm: mtp is served with tensor_parallel_size 1 only"):
        load_with(folder, tensor_parallel_size=2)
    with pytest.raises(ValueError, match="speculative_algorithm mtp: the checkpoint has no tensor model.layers.4"):
        load_with(checkpoint("qwen3_next")[0])
    shutil.copytree(folder, tmp_path / "model")
    path = tmp_path / "model/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_nextn_predict_layers": 0}))
    with pytest.raises(ValueError, match="by its config.json the model has no layer for multi-token prediction"):
        load_with(tmp_path / "model")
    assert has_predictor({"model_type": "qwen3_next"}) and not has_predictor({"model_type": "deepseek_v32"})


def test_a_layer_that_could_be_used_is_named(made, checkpoint, caplog):
    caplog.set_level("INFO")
    gpu, cpu = torch.device("cuda", 0), torch.device("cpu")
    with_it, without = made("qwen3_next")[0], checkpoint("qwen3_next")[0]
    config = read_json(with_it / "config.json")
    base = WorkerConfig(str(with_it))
    llama = read_json(checkpoint("llama")[0] / "config.json")

    def is_named(config: WorkerConfig, *rest: object) -> bool:
        caplog.clear()
        assert not predicts(config, *rest)
        return "multi-token prediction" in caplog.text

    assert is_named(base, config, with_it, gpu) and is_named(base, config, made("glm4_moe")[0], gpu)
    for rest in ((config, without, gpu), (config, with_it, cpu), (llama, with_it, gpu)):
        assert not is_named(base, *rest)
    for changes in ({"tensor_parallel_size": 2}, {"load_format": "dummy"}, {"speculative_algorithm": "ngram"}):
        assert not is_named(dataclasses.replace(base, **changes), config, with_it, gpu)


def test_random_weights(made):
    folder, _ = made("glm4_moe")
    runner = load_with(folder, load_format="dummy")
    assert len(Engine(runner, drafter=Always(runner)).generate(prompts(1, 9, 9))[0]) == 64
