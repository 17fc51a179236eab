"""The tokenizer, the data and the model of training.nano: the same for the trainer, transformers and radixrt."""

from __future__ import annotations

import itertools
import json
import random
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import sentencepiece
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from radixrt.config import WorkerConfig, resolve
from radixrt.formats.parsing.detect import PROBE, tool_format
from radixrt.formats.parsing.hermes import Hermes
from radixrt.messages import ChatPrompt
from radixrt.tokens import load_tokenizer
from radixrt.worker.load.runner import load_runner
from tests.worker.engine import GREEDY, Engine
from training.nano import data, tokenizer, train
from training.nano.export import export, load
from training.nano.model import Model, Shape, attend_each
from training.nano.muon import Muon, orthogonal
from training.nano.render import chat_turns, text_of, turns_of
from training.nano.tasks import TAGS, Words, calls_of, make
from training.nano.train import Ahead, Trainer, rate

SHAPE = Shape(width=64, layers=2, heads=2, kv_heads=1, head_dim=32, hidden=96, positions=512)


@pytest.fixture(scope="module")
def pieces() -> bytes:
    return tokenizer.train()


@pytest.fixture(scope="module")
def folder(pieces, tmp_path_factory):
    """A checkpoint of random weights."""
    folder = tmp_path_factory.mktemp("nano")
    tokenizer.write(folder, pieces)
    torch.manual_seed(1)
    model = Model(SHAPE)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.1)
    export(model, folder, torch.float32)
    return folder


@pytest.fixture(scope="module")
def radixrt_tokenizer(folder):
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def hf_tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


def examples(count=3):
    for kind, tags in TAGS.items():
        for tag in tags[:2] if kind.startswith("recall") else tags:
            for seed in range(count):
                yield make(kind, tag, seed, "eval" if seed % 2 else "train")


def test_tokenizers_agree(pieces, folder, radixrt_tokenizer, hf_tokenizer):
    """On the text of whole chats, and on text that no task writes."""
    sp = sentencepiece.SentencePieceProcessor(model_proto=pieces)
    encoder = data.Encoder(pieces)
    for example in examples():
        text, (ids, _) = text_of(turns_of(example)), encoder.encode(example)
        assert radixrt_tokenizer.encode(text, add_special_tokens=False) == ids
        assert hf_tokenizer(text, add_special_tokens=False).input_ids == ids
        assert radixrt_tokenizer.decode(ids, skip_special_tokens=False) == text
    for text in ("Héllo wörld 🙂!\n\n  a   b\t", " \n \n", 'x = {"a": [1, 2.5], \'b\': "東京"}', "12345 6-7", ""):
        ids = sp.encode(text)
        assert radixrt_tokenizer.encode(text, add_special_tokens=False) == ids
        assert hf_tokenizer(text, add_special_tokens=False).input_ids == ids
        assert radixrt_tokenizer.decode(ids) == hf_tokenizer.decode(ids) == text
        assert radixrt_tokenizer.encode(text) == hf_tokenizer(text).input_ids == [sp.bos_id(), *ids]


def test_a_word_has_one_spelling(pieces):
    """Behind a space, a quote or a bracket: copying it is copying ids."""
    sp = sentencepiece.SentencePieceProcessor(model_proto=pieces)
    for seed in range(50):
        word = data.Words(random.Random(seed), "train").name()
        ids = sp.encode(word)
        for text in (f"the {word}.", f'{{"name": "{word}"}}', f"({word},"):
            found = sp.encode(text)
            assert any(found[i : i + len(ids)] == ids for i in range(len(found))), (word, text)
    assert len(sp.encode("4817")) == 4


def test_templates_write_what_the_data_has(radixrt_tokenizer, hf_tokenizer):
    for example in examples():
        messages = example.messages + example.gold
        text = text_of(turns_of(example))
        assert radixrt_tokenizer.apply_chat(ChatPrompt(messages, example.tools), answer_next=False) == text
        assert hf_tokenizer.apply_chat_template(messages, tools=example.tools, tokenize=False) == text
        parsed = [_with_dicts(message) for message in messages]
        assert hf_tokenizer.apply_chat_template(parsed, tools=example.tools, tokenize=False) == text


def _with_dicts(message):
    calls = [
        call | {"function": call["function"] | {"arguments": arguments}}
        for call, (_, arguments) in zip(message.get("tool_calls", []), calls_of(message), strict=True)
    ]
    return message | {"tool_calls": calls} if calls else message


def test_template_only_appends(radixrt_tokenizer):
    """A later prompt begins with the earlier one and what was generated."""
    for example in examples():
        for i, message in enumerate(example.gold):
            if message["role"] != "assistant":
                continue
            before = radixrt_tokenizer.apply_chat(ChatPrompt(example.messages + example.gold[:i], example.tools))
            answer = text_of(chat_turns([message], None)).removeprefix("<s><|assistant|>")
            after = radixrt_tokenizer.apply_chat(
                ChatPrompt(example.messages + example.gold[: i + 1], example.tools), answer_next=False
            )
            assert after == before + answer


def test_template_takes_what_clients_send(radixrt_tokenizer):
    """Tools without parameters, types that are lists, messages without content, no messages of the system."""
    tools = [
        {"type": "function", "function": {"name": "f"}},
        {
            "type": "function",
            "function": {"name": "g", "parameters": {"properties": {"a": {"type": ["string", "null"]}}}},
        },
    ]
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [{"role": "user", "content": "-"}, {"role": "assistant", "content": "x", "tool_calls": [call, call]}]
    text = radixrt_tokenizer.apply_chat(ChatPrompt(messages, tools))
    one = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    tools = "<s><|system|>Tools:\nf(): \ng(a: any): <|end|>"
    assert text == f"{tools}<|user|>-<|end|><|assistant|>x\n{one}\n{one}<|end|><|assistant|>"


def test_calls_are_recognised_and_shown(radixrt_tokenizer):
    assert isinstance(tool_format("auto", radixrt_tokenizer.apply_chat(PROBE)), Hermes)
    assert radixrt_tokenizer.decode(radixrt_tokenizer.encode("<tool_call>")) == "<tool_call>"
    assert radixrt_tokenizer.eos_ids == {radixrt_tokenizer.token_id("<|end|>")}
    assert radixrt_tokenizer.decode([radixrt_tokenizer.token_id("<|end|>")]) == ""


# ---------------------------------------------------------------- data


def test_batches_hold_whole_examples_and_mark_answers(pieces):
    sp = sentencepiece.SentencePieceProcessor(model_proto=pieces)
    batch = next(data.stream(pieces, 0, 6000, [0.3], frozenset(), data.SHARES))
    tokens, targets, what, positions, groups = batch.columns.astype(int)
    assert batch.starts[0] == 0 and batch.starts[-1] == 6000
    seen = set()
    for start, end in itertools.pairwise(batch.starts):
        ids = tokens[start:end].tolist()
        if ids[0] == sp.pad_id():
            assert not what[start:end].any()
            continue
        assert ids[0] == sp.bos_id() and ids[-1] == sp.piece_to_id("<|end|>")
        assert positions[start:end].tolist() == list(range(end - start))
        assert targets[start : end - 1].tolist() == ids[1:] and what[end - 1] == data.NOTHING
        seen.add(data.KINDS[groups[start]])
        answers, inside = [], False
        for token in ids[1:]:
            answers.append(data.ANSWER if inside else data.CONTEXT)
            inside = token == sp.piece_to_id("<|assistant|>") or (inside and token != sp.piece_to_id("<|end|>"))
        assert what[start : end - 1].tolist() == answers
    assert seen >= {"recall", "tools", "arithmetic", "json"}
    assert (what == data.NOTHING).mean() < 0.1


def test_forbidden_examples_never_come(pieces, monkeypatch):
    """A generator that makes few different examples: the forbidden ones are left out."""
    pool = [make("chat", "talk", seed, "train") for seed in range(6)]
    forbidden = frozenset(example.fingerprint() for example in pool[:3])
    monkeypatch.setattr(data, "training_example", lambda words, kind, progress: words.pick(pool))
    encoder = data.Encoder(pieces)
    bad = [encoder.encode(example)[0] for example in pool if example.fingerprint() in forbidden]
    batch = next(data.stream(pieces, 0, 4000, [0.0], forbidden, {"chat": 1.0}))
    rows = [batch.columns[0, a:b].tolist() for a, b in itertools.pairwise(batch.starts)]
    assert len(rows) > 20 and not any(row in bad for row in rows)


def test_training_asks_the_same_tools_again():
    words = Words(random.Random(0), "train")
    turns = [
        sum(message["role"] == "user" for message in data.training_example(words, "tools", 0.5).gold) for _ in range(50)
    ]
    assert min(turns) == 0 and max(turns) >= 6


def test_contexts_grow():
    lengths = [data.longest_context(p) for p in np.linspace(0, 1, 30)]
    assert lengths == sorted(lengths) and lengths[0] == 192 and lengths[-1] == 4096


def test_an_example_that_never_fits_is_refused():
    with pytest.raises(ValueError, match="an example has 9 tokens"):
        data.pack([([1] * 9, [1] * 9, 0)], 8, 2)


# ---------------------------------------------------------------- model and training


def test_exported_model_is_the_trained_one(folder):
    """By transformers and by radixrt's runner: the same logits."""
    model = Model(SHAPE)
    load(model, folder)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 2048, (90,), generator=generator)
    starts = torch.tensor([0, 40, 90], dtype=torch.int32)
    positions = torch.cat([torch.arange(40), torch.arange(50)])
    with torch.no_grad():
        ours = model.logits(model(tokens, positions, starts, 50))
        theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for start, end in ((0, 40), (40, 90)):
            expected = theirs(tokens[None, start:end]).logits[0]
            torch.testing.assert_close(ours[start:end], expected, atol=2e-4, rtol=2e-4)
    config = WorkerConfig(model=str(folder), device="cpu", max_total_tokens=512)
    engine = Engine(load_runner(resolve(config)), chunk=64)
    engine.add(tokens[:40].tolist(), GREEDY, score_from=1)
    served = engine.runner.logits(engine.scheduler.plan())
    torch.testing.assert_close(served[:40], ours[:40], atol=2e-4, rtol=2e-4)


def test_size_of_the_default():
    model = Model(Shape())
    count = sum(p.numel() for p in model.parameters())
    assert 5e6 < count < 15e6 and 2 * count < 24.9e6


def test_orthogonal():
    for rows, columns in ((48, 48), (16, 48), (96, 40)):
        matrices = torch.randn(3, rows, columns, generator=torch.Generator().manual_seed(0))
        found = orthogonal(matrices)
        assert found.shape == matrices.shape and (found * matrices).sum() > 0
        values = torch.linalg.svdvals(found)
        assert values.max() < 1.25 and values.median() > 0.6


def test_muon_follows_the_gradient():
    """A linear regression: the loss falls to nearly nothing."""
    generator = torch.Generator().manual_seed(0)
    wanted, x = (torch.randn(2, n, 8, generator=generator) for n in (6, 64))
    weight = torch.nn.Parameter(torch.zeros(2, 6, 8))
    optimizer = Muon([weight], weight_decay=0.0)
    for step in range(200):
        loss = ((x @ (weight - wanted).mT) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.param_groups[0]["lr"] = 0.1 * (1 - step / 200)
        optimizer.step()
    assert loss < 0.01


def test_learning_rate_ends_at_zero():
    assert rate(0.0) == 0.0 and rate(0.2) == 1.0 and rate(1.0) == 0.0 and 0 < rate(0.8) < 0.5


def test_a_later_piece_warms_up():
    assert rate(0.4, 0.4) == 0.0 and rate(0.42, 0.4) == 1.0 and rate(1.0, 0.4) == 0.0
    rates = [rate(p, 0.4) for p in np.linspace(0.46, 1, 30)]
    assert rates == sorted(rates, reverse=True)


def test_decay_bounds_the_weights():
    """A step has one size for ever; what one gradient pushes goes to 1 / weight decay, and no farther."""
    weight = torch.nn.Parameter(torch.zeros(1, 4, 4))
    optimizer = Muon([weight], lr=0.1, weight_decay=0.2)
    sizes = []
    for _ in range(600):
        weight.grad = torch.eye(4)[None]
        optimizer.step()
        sizes.append(torch.linalg.matrix_norm(weight.detach(), 2).item())
    assert sizes[0] == pytest.approx(0.1, rel=0.3) and sizes == sorted(sizes)
    assert sizes[-1] == pytest.approx(5, rel=0.3) and sizes[-1] - sizes[-50] < 0.01


def test_shares_and_weights_by_kind(monkeypatch, capsys):
    def given(*more: str):
        monkeypatch.setattr(sys, "argv", ["train", *more])
        return train.arguments()

    assert given().shares == data.SHARES and given().answer_weight == data.ANSWER_WEIGHT
    some = given("--shares", "tools=0.5", "chat=0", "--answer-weight", "chat=3", "choose=1")
    assert some.shares == {k: 0.5 if k == "tools" else v for k, v in data.SHARES.items() if k != "chat"}
    assert some.answer_weight == data.ANSWER_WEIGHT | {"chat": 3, "choose": 1}
    for bad in (["--shares", "x=1"], ["--shares", "tools"], ["--answer-weight", "tools=much"]):
        with pytest.raises(SystemExit):
            given(*bad)
        assert bad[0] in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.slow
def test_two_pieces_are_one_training(tmp_path, monkeypatch):
    """The second goes on from the step, the state and the progress of the first, with the same tokenizer and log."""
    monkeypatch.setattr(train, "QUICK", replace(SHAPE, positions=8192))
    monkeypatch.setattr(train, "RESERVE_S", 0)
    given = "--quick --device cpu --tokens 8192 --workers 1 --minutes 0.25 --total-minutes 0.5 --check-items 1"
    given += f" --forbidden-items 1 --log-every 1 --state {tmp_path / 'state'} --out {tmp_path / 'out'}"
    for more in ([], ["--resume"]):
        monkeypatch.setattr(sys, "argv", ["train", *given.split(), *more])
        train.main()
    entries = [json.loads(line) for line in (tmp_path / "out" / "training.jsonl").read_text().splitlines()]
    starts, ends = ([e for e in entries if e["event"] == event] for event in ("start", "exported"))
    assert [e["step"] for e in starts] == [0, ends[0]["step"]] and ends[0]["step"] < ends[1]["step"]
    progress = [e["progress"] for e in entries if "progress" in e]
    assert progress == sorted(progress) and progress[-1] > 0.9
    first = next(e["progress"] for e in entries[::-1] if e["event"] == "check" and e["step"] == ends[0]["step"])
    assert 0 < first < 0.7
    state = torch.load(tmp_path / "state", weights_only=True)
    assert state["step"] == ends[1]["step"] and state["pieces_done"] == 2


def batch_of(first):
    return data.Batch(np.full((5, 8), first, dtype=np.int16), np.array([0, 3, 8], dtype=np.int32))


class Fed:
    """A feed of numbered batches, and then an error."""

    def __init__(self, count):
        self.count, self.asked = count, []

    def next(self, progress):
        self.asked.append(progress)
        if len(self.asked) > self.count:
            raise RuntimeError("a process that makes batches died")
        return batch_of(len(self.asked))


def test_batches_come_ahead_in_order():
    feed = Fed(5)
    ahead = Ahead(feed, 0.5, pin=False)
    for i in range(5):
        columns, starts, longest = ahead.next(0.6)
        assert columns.unique().tolist() == [i + 1] and starts.tolist() == [0, 3, 8] and longest == 5
    with pytest.raises(RuntimeError, match="died"):
        ahead.next(0.6)
    ahead.close()
    assert feed.asked[0] == 0.5 and feed.asked[-1] == 0.6


def test_ahead_stops_while_nobody_takes():
    ahead = Ahead(Fed(10**9), 0.5, pin=False)
    ahead.next(0.5)
    ahead.close()


def test_a_later_piece_goes_on_with_the_log(tmp_path):
    def goes_on(init, resume=False):
        args = SimpleNamespace(init=init, out=tmp_path / "new", resume=resume)
        return Trainer._log_goes_on(SimpleNamespace(args=args))

    (tmp_path / "new").mkdir()
    assert not goes_on(None) and not goes_on(tmp_path) and goes_on(None, resume=True)
    (tmp_path / "training.jsonl").write_text("one\n")
    assert goes_on(tmp_path) and (tmp_path / "new" / "training.jsonl").read_text() == "one\n"
    (tmp_path / "new" / "training.jsonl").write_text("one\ntwo\n")
    assert goes_on(tmp_path / "new") and (tmp_path / "new" / "training.jsonl").read_text() == "one\ntwo\n"


def test_attention_stays_within_examples():
    """An example's outputs do not depend on its neighbours."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(30, n, 16, generator=generator) for n in (4, 2, 2))
    starts = torch.tensor([0, 12, 30], dtype=torch.int32)
    whole = attend_each(q, k, v, starts, 18)
    alone = attend_each(q[12:], k[12:], v[12:], torch.tensor([0, 18], dtype=torch.int32), 18)
    torch.testing.assert_close(whole[12:], alone)
