"""Tool choice: a reader finds exactly one right tool, evaluation stays what it is, training's further turns hold."""

from __future__ import annotations

import hashlib
import json
import random
import re
from itertools import combinations

import pytest

from training.nano.tasks import TAGS, Words, draw, make, toolbox, tools
from training.nano.tasks.domains import DOMAINS
from training.nano.tasks.example import calls_of
from training.nano.tasks.more_domains import MORE_DOMAINS, NEAR, alike, close_domains
from training.nano.tasks.phrases import bare
from training.nano.tasks.words import COLORS, DAYS, LANGUAGES, THINGS

FEW_WORDS = r"[a-z]+(?: [a-z]+)?"
VALUES = {
    "hour": r"\d+", "count": r"\d+", "day": "|".join(DAYS), "language": "|".join(LANGUAGES),
    "color": "|".join(COLORS), "item": "|".join(THINGS), "device": FEW_WORDS, "text": FEW_WORDS, "file": r"\w+\.\w+",
    "someone": r"[A-Z]\w+(?: [A-Z]\w+)?", "city": "[A-Z][a-z]+", "name": "[A-Z][a-z]+",
}  # fmt: skip
"""What a reader takes for a value of each kind."""


def pattern(request, domain):
    parts = re.split(r"\{(\d)\}", request)
    parts[::2] = map(re.escape, parts[::2])
    parts[1::2] = [f"(?P<v{i}>{VALUES[domain.arguments[int(i)][2]]})" for i in parts[1::2]]
    return re.compile("".join(parts))


READS = [(domain, pattern(text, domain)) for domain in DOMAINS for text in domain.requests.of["eval"]]
DESCRIBED = {text: domain for domain in DOMAINS for text in domain.descriptions}


def reading(request, listed):
    """The calls that a reader of evaluation's request makes, by the descriptions alone: (name, arguments) of each."""
    found = []
    for tool in listed:
        function = tool["function"]
        names = list(function["parameters"]["properties"])
        if domain := DESCRIBED.get(function["description"]):
            ways = [known for own, known in READS if own is domain]
        else:
            verb = re.fullmatch(r"Use it to (\w+) .*", function["description"])[1]
            pairs = " and ".join(f"{name} (?P<v{i}>.+?)" for i, name in enumerate(names))
            ways = [re.compile(rf"(?:Can you|Please) {verb} {pairs}(?:\?| now\.)")]
        for match in filter(None, (known.fullmatch(request) for known in ways)):
            found.append((function["name"], {name: match[f"v{i}"] for i, name in enumerate(names)}))
    return found


@pytest.mark.parametrize("tag", ["1", "3", "6"])
def test_a_reader_finds_the_one_right_tool(tag):
    """However tools are named: the request and the descriptions say which, and with which values."""
    for seed in range(200):
        item = make("tools", tag, seed)
        found = [(name, {k: str(v) for k, v in a.items()}) for name, a in reading(asked(item), item.tools)]
        (name, arguments) = item.gold_result()[1][0]
        assert found == [(name, {key: str(value) for key, value in arguments.items()})], asked(item)


def test_a_reader_finds_no_tool_where_none_fits():
    for seed in range(200):
        item = make("tools", "none", seed)
        assert reading(asked(item), item.tools) == [], asked(item)


def test_what_training_asks_for_is_one_tools_alone():
    """No request, with kinds of values for values, is made to two tools of different purposes."""
    seen = {}
    for domain in MORE_DOMAINS:
        rng = random.Random(0)
        for _ in range(300):
            words = re.split(r"\{(\d)\}", bare(domain.requests.template(rng.random, "train")))
            words[1::2] = [domain.arguments[int(i)][2] for i in words[1::2]]
            assert seen.setdefault("|".join(words), domain) is domain, words
    assert len(seen) > 9000


def test_only_the_right_call_passes():
    """Another listed tool, another name or value of an argument, a call left out, one more, the other order: no."""
    for tag in ("3", "6", "two"):
        for seed in range(60):
            item = make("tools", tag, seed)
            text, gold = item.gold_result()
            (name, arguments), *rest = gold
            assert item.check(text, gold)
            wrong = [[(tool["function"]["name"], arguments), *rest] for tool in item.tools]
            wrong = [made for made in wrong if made != gold]
            key = next(iter(arguments))
            wrong += [[(name, arguments | {key: "zop"}), *rest], [(name, {"zop": arguments[key]}), *rest]]
            wrong += [rest, [*gold, gold[-1]], gold[:-1]] + ([gold[::-1]] if rest else [])
            assert not any(item.check(text, made) for made in wrong), item


def test_evaluation_stays_what_it_is():
    """Figures of one day are comparable with those of another: whoever changes this changes what they mean."""
    digest = hashlib.blake2b(digest_size=8)
    for tag in TAGS["tools"]:
        for seed in range(40):
            item = make("tools", tag, seed)
            digest.update(json.dumps([item.messages, item.tools, item.gold]).encode())
    assert digest.hexdigest() == "f381e5ab2bf403cd"


# ---------------------------------------------------------------- training


def asked(example):
    return example.messages[-1]["content"]


def talks(count, tags=TAGS["tools"], turns=5):
    for tag in tags:
        for seed in range(count):
            yield draw(Words(random.Random(f"{tag}/{seed}"), "train"), "tools", tag, turns)


def test_further_turns_call_listed_tools_with_what_was_said():
    """And each turn ends with an answer; ids of calls are each their own."""
    kinds = set()
    for talk in talks(120):
        listed = {tool["function"]["name"]: tool["function"] for tool in talk.tools}
        descriptions = {function["description"] for function in listed.values()}
        ids = [call["id"] for message in talk.gold for call in message.get("tool_calls", [])]
        assert len(ids) == len(set(ids)) and talk.gold[-1]["role"] == "assistant"
        assert sum(message["role"] == "user" for message in talk.gold) == 4
        said = ""
        for message in [*talk.messages, *talk.gold]:
            if message["role"] == "user":
                said = message["content"]
                assert "oK" not in said
            if message["role"] != "assistant":
                continue
            for name, arguments in calls_of(message):
                kinds.add("call")
                assert set(arguments) == set(listed[name]["parameters"]["properties"])
                assert all(str(value) in said for value in arguments.values()), (said, arguments)
            content = message["content"]
            kinds.add("none" if content == tools.NO_TOOL else "name" if content in listed else "other")
            kinds.add("description" if content in descriptions else "other")
    assert kinds == {"call", "none", "name", "description", "other"}


def test_the_same_seed_makes_the_same_talk():
    again = talks(20)
    assert all(
        (a.messages, a.tools, a.gold) == (b.messages, b.tools, b.gold) for a, b in zip(talks(20), again, strict=True)
    )


def test_close_tools_are_of_few_verbs_and_few_things():
    """Different ones, none of which may do what another is for."""
    words = Words(random.Random(0), "train")
    for _ in range(300):
        count = words.between(2, 7)
        found = close_domains(words, count)
        assert len({(d.act, d.thing) for d in found}) == len(found) == count
        assert len({d.act for d in found}) <= 3
        assert not any(alike(a, b) for a, b in combinations(found, 2))
        shared = [a for a, b in combinations(found, 2) if a.act == b.act or a.thing == b.thing]
        assert shared or count < 4


def test_no_listed_tool_may_do_what_training_refuses():
    """Where training says that it has no tool, none of those listed is for the same or nearly so."""
    words, refused = Words(random.Random(0), "train"), 0
    for i in range(3000):
        bounds = toolbox.toolbox(words, 4)
        bounds, said = tools._without(words, bounds) if i % 2 else (bounds, tools._later(words, bounds))
        if said.answer != tools.NO_TOOL:
            continue
        refused += 1
        for bound in bounds:
            assert not bound.verb or bound.verb not in said.text.split(), (bound, said.text)
            if bound.domain and bound.domain.act:
                thing = bound.domain.thing or r"(\w+ )?\w+"
                assert not re.search(rf"\b{bound.domain.act} (the |of the )?{thing}[.!?]?$", said.text), said.text
    assert 800 < refused < 1400


def test_training_refuses_nothing_that_a_listed_tool_may_do(monkeypatch):
    """Who is asked to check a thing, and may inspect it, cannot say that there is no tool."""
    words, by_name = Words(random.Random(0), "train"), {domain.names[0]: domain for domain in MORE_DOMAINS}
    near, far = (
        [toolbox.bind(words, by_name[n]) for n in names] for names in (("inspect", "check"), ("price", "play"))
    )
    monkeypatch.setattr(tools, "toolbox", lambda w, count: far)
    found = [tools._without(words, near) for _ in range(100)]
    refused = [bounds for bounds, said in found if said.answer == tools.NO_TOOL]
    assert refused and all(bounds == far[:1] for bounds in refused)
    assert any(tools._later(words, near).answer == tools.NO_TOOL for _ in range(100))
    monkeypatch.setattr(tools, "toolbox", lambda w, count: near[1:])
    assert not any(tools._later(words, near[:1]).answer == tools.NO_TOOL for _ in range(100))


def test_questions_about_tools_have_their_answers():
    words, seen = Words(random.Random(0), "train"), set()
    for _ in range(1500):
        bounds = toolbox.toolbox(words, 4)
        said = tools._later(words, bounds)
        by_name = {bound.name: bound for bound in bounds}
        if said.answer in by_name and not said.wanted:
            right = by_name[said.answer]
            if named := [bound for bound in bounds if bound.description in said.text]:
                seen.add("by description")
                assert right.description in [bound.description for bound in named]
            elif verbs := [bound for bound in bounds if bound.verb and f" {bound.verb} " in said.text]:
                seen.add("for a request")
                assert right in verbs
        elif said.answer in [bound.description for bound in bounds]:
            seen.add("description")
            assert by_name[next(name for name in by_name if name in said.text)].description == said.answer
    assert seen == {"by description", "for a request", "description"}


def test_alike_are_those_that_do_for_each_other():
    by_name = {domain.names[0]: domain for domain in MORE_DOMAINS}
    assert alike(by_name["weather"], by_name["weather_on"]) and alike(by_name["check"], by_name["inspect"])
    assert not alike(by_name["turn_on"], by_name["turn_off"]) and not alike(by_name["open"], by_name["close"])
    assert all(a is b or a.names[0] != b.names[0] for a in MORE_DOMAINS for b in MORE_DOMAINS)
    assert len(NEAR) > 10


def test_most_names_of_training_say_nothing():
    """So that the descriptions must be read; a known name still comes."""
    words, known = Words(random.Random(0), "train"), {name for domain in MORE_DOMAINS for name in domain.names}
    names = [bound.name for _ in range(300) for bound in toolbox.toolbox(words, 5)]
    said = sum(name in known for name in names) / len(names)
    assert 0.1 < said < 0.35
