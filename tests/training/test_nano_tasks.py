"""The tasks: gold answers pass their own checkers, wrong ones do not, training and evaluation are apart."""

from __future__ import annotations

import json
import random
import re

import jsonschema
import pytest

from training.nano.render import turns_of
from training.nano.tasks import (
    SPLITS,
    TAGS,
    Words,
    arithmetic,
    calls_of,
    chat,
    choose,
    domains,
    draw,
    evaluation,
    lookup,
    make,
    recall,
    toolbox,
    tools,
)
from training.nano.tasks import fill as fill_task
from training.nano.tasks.arithmetic import run_expression
from training.nano.tasks.phrases import MACROS, Phrases, bare, expand, parse, vary
from training.nano.tasks.words import fill, split_of

ALL = [(kind, tag) for kind, tags in TAGS.items() for tag in tags]
SHORT = [(kind, tag) for kind, tag in ALL if tag not in ("1024", "2048", "4096")]


def seeds(kind, tag):
    return range(200 if (kind, tag) in SHORT[4:] else 60 if (kind, tag) in SHORT else 8)


@pytest.mark.parametrize("split", SPLITS)
def test_gold_passes(split):
    """Its final text and calls, and the tools' replies are those that the tools give to the gold calls."""
    for kind, tag in ALL:
        for seed in seeds(kind, tag):
            example = make(kind, tag, seed, split)
            text, calls = example.gold_result()
            assert example.check(text, calls), (kind, tag, seed)
            replies = [message["content"] for message in example.gold if message["role"] == "tool"]
            assert [example.run_tool(*call) for call in calls] == replies
            assert not any("error" in reply for reply in replies)


def test_another_answer_fails():
    """The gold answer of another example, or none, is wrong for nearly every item; labels may agree by chance."""
    for kind, tag in SHORT:
        items = [make(kind, tag, seed) for seed in range(40)]
        passed = sum(
            item.check(*other.gold_result())
            for item, other in zip(items, items[1:] + items[:1], strict=True)
            if item.gold[-1]["content"] != other.gold[-1]["content"]
            or calls_of(item.gold[0]) != calls_of(other.gold[0])
        )
        assert passed <= 2, (kind, tag, passed)
        assert not any(item.check("", []) for item in items)


def test_recall_wants_all_values_in_order_and_no_other():
    item = make("recall_several", "256", 1)
    text, _ = item.gold_result()
    first, *rest = text.split(". ")
    assert not item.check(". ".join(rest), [])
    assert not item.check(". ".join([*rest, first]), [])
    other = next(make("recall", "256", seed) for seed in range(9))
    one, _ = other.gold_result()
    assert other.check(one, []) and not other.check(one + other.messages[0]["content"], [])


def test_the_checker_wants_the_tool_to_be_used():
    for kind in ("arithmetic", "lookup"):
        item = make(kind, "2", 0)
        text, calls = item.gold_result()
        assert item.check(text, calls) and not item.check(text, [])
    item = make("tools", "3", 0)
    text, calls = item.gold_result()
    assert not item.check(text, calls + calls) and not item.check(text, [("other", calls[0][1])])


def test_arithmetic_takes_the_last_number():
    item = next(i for i in (make("arithmetic", "2", seed) for seed in range(9)))
    text, calls = item.gold_result()
    assert not item.check(text + " Or 5.", calls)


def test_calculator():
    assert run_expression("12 + 7") == "19" and run_expression("3*4") == "12" and run_expression("5 - 9") == "-4"
    assert run_expression("1 + 2 + 3").startswith("error") and run_expression("__import__").startswith("error")


def test_expressions_mean_what_the_steps_say():
    """Python reads the expression as the gold steps do."""
    found = 0
    for tag in TAGS["arithmetic"]:
        for seed in range(80):
            item = make("arithmetic", tag, seed, "train")
            asked = item.messages[-1]["content"]
            expression = "".join(c for c in asked if c in "0123456789+-*() ")
            if "(" in asked or " + " in asked or " * " in asked:
                found += 1
                assert item.check(str(eval(expression)), item.gold_result()[1]), asked  # noqa: S307
    assert found > 50


def test_tools_hold_the_calls():
    """Each gold call is of a listed tool, with exactly its arguments, of their types."""
    types = {"string": str, "integer": int}
    for kind in ("tools", "arithmetic", "lookup"):
        for tag in TAGS[kind]:
            for seed in range(50):
                item = make(kind, tag, seed, "train")
                listed = {tool["function"]["name"]: tool["function"]["parameters"] for tool in item.tools}
                assert len(listed) == len(item.tools)
                for name, arguments in item.gold_result()[1]:
                    properties = listed[name]["properties"]
                    assert set(arguments) == set(properties) == set(listed[name]["required"])
                    assert all(type(arguments[key]) is types[properties[key]["type"]] for key in properties)


def test_tools_of_one_example_have_different_names():
    words = Words(random.Random(0), "train")
    for _ in range(300):
        names = {bound.name for bound in tools.toolbox(words, 6, ("open", "close"))}
        assert len(names) == 6 and not names & {"open", "close"}


def test_json_follows_its_schema():
    for tag in TAGS["json"]:
        for seed in range(50):
            item = make("json", tag, seed)
            text, _ = item.gold_result()
            jsonschema.validate(json.loads(text), item.schema)
            assert not item.check(text[:-1], []) and not item.check("{}", [])


def test_choices_hold_the_answer():
    for tag in TAGS["choose"]:
        answers = [(item.gold[0]["content"], item.choices) for item in (make("choose", tag, s) for s in range(60))]
        assert all(answer in choices for answer, choices in answers)
        assert len({answer for answer, _ in answers}) > 1


def test_no_tool_means_no_fitting_tool():
    """A refusal is right only where the tool that was asked for is not listed."""
    item = next(
        i for i in (make("tools", "none", s) for s in range(30)) if i.gold[0]["content"].startswith("I have no")
    )
    assert item.check("I have no tool for that.", []) and not item.check("Done.", [])


# ---------------------------------------------------------------- training and evaluation


def test_no_item_is_in_both_splits():
    train = {make(kind, tag, seed, "train").fingerprint() for kind, tag in SHORT for seed in range(150)}
    assert not train & {item.fingerprint() for item in evaluation(20)}


def test_fingerprints_differ_with_the_question_only():
    a, b = make("recall", "256", 3), make("recall", "256", 3)
    assert a.fingerprint() == b.fingerprint() != make("recall", "256", 4).fingerprint()


def test_names_and_numbers_are_of_one_split():
    rng = random.Random(0)
    for split in SPLITS:
        words = Words(rng, split)
        for maker in ("word", "place", "code"):
            assert {split_of(getattr(words, maker)()) for _ in range(200)} == {split}


def test_a_phrase_is_of_one_split():
    with pytest.raises(ValueError, match="in both splits"):
        Phrases(["a", "b"], ["b"])
    assert fill("{X} and {x}", {"x": "the mill"}) == "The mill and the mill"


def test_the_same_seed_makes_the_same_example():
    for kind, tag in SHORT:
        assert make(kind, tag, 5).messages == make(kind, tag, 5).messages


def test_training_asks_several_questions_of_one_context():
    item = draw(Words(random.Random(1), "train"), "recall", "300", turns=4)
    assert [message["role"] for message in item.gold] == ["assistant", "user"] * 3 + ["assistant"]


def test_training_chooses_several_times():
    """Each answer is a label or an option of the question before it, or a thought that ends with a label, or a sum."""
    for tag in TAGS["choose"]:
        for seed in range(60):
            item = draw(Words(random.Random(seed), "train"), "choose", tag, turns=5)
            turns = [*item.messages, *item.gold]
            assert [message["role"] for message in item.gold] == ["assistant", "user"] * 4 + ["assistant"]
            text = ""
            for before, after in zip(turns, turns[1:], strict=False):
                text += "\n" + before["content"]
                if after["role"] == "assistant":
                    label = re.fullmatch(r"(?:.*(?:That is|So) )?(.+?)\.?", after["content"], re.DOTALL)[1]
                    sums = re.findall(r"\d+ [-+] \d+", before["content"])
                    of_sum = [str(eval(s)) for s in sums] == [label]  # noqa: S307
                    assert of_sum or label in text or label in ("yes", "no"), (label, text)


def test_labels_in_training_are_those_of_the_right_options():
    """However options are labelled, ordered and asked for."""
    for tag in ("copy", "sum", "compare"):
        for seed in range(300):
            found = choose._round(Words(random.Random(seed), "train"), tag, [])
            half = len(found.listed) // 2
            label = re.fullmatch(r"(?:.*That is )?(\w+)\.?", found.answer)[1]
            options = dict(zip(found.listed[:half], found.listed[half:], strict=True))
            assert len(options) == half >= 2
            if tag == "copy":
                stated = found.text
                for listed in found.listed[half:]:  # once as an option; the one that is stated, once more
                    stated = stated.replace(listed, "", 1)
                assert options[label] in stated
            elif tag == "sum":
                right = [k for k, v in options.items() if eval(v.split("=")[0]) == int(v.split("=")[1])]  # noqa: S307
                assert right == [label]
            else:
                small = re.search("small|least|low|tiniest|less", found.text)
                assert int(options[label]) == (min if small else max)(map(int, options.values())), found


# ---------------------------------------------------------------- phrasings of training


def phrases_of(thing):
    """All Phrases within a module's values."""
    if isinstance(thing, Phrases):
        yield thing
    elif isinstance(thing, dict):
        yield from phrases_of(tuple(thing.values()))
    elif isinstance(thing, tuple):
        for part in thing:
            yield from phrases_of(part)


MODULES = (arithmetic, chat, choose, domains, fill_task, lookup, recall, toolbox, tools)
PHRASES = list({id(p): p for module in MODULES for value in vars(module).values() for p in phrases_of(value)}.values())


def rendered(count, kinds, seed=0):
    """The text of so many training examples of each kind, questions of several turns included."""
    for kind in kinds:
        words = Words(random.Random(seed), "train")
        for _ in range(count):
            tag = words.pick([tag for tag in TAGS[kind] if tag not in ("512", "1024", "2048", "4096")])
            example = draw(words, kind, tag, words.between(1, 3))
            yield kind, "\n".join(text for _, text in turns_of(example))


def test_a_grammar_says_all_its_texts():
    tree = parse("<a|b<c|>|> {x}@end")
    found = {expand(tree, random.Random(seed).random) for seed in range(300)}
    assert found == {f"{word} {{x}}{end}" for word in ("a", "bc", "b", "") for end in (".", "!", "?", "")}
    for wrong in ("<a|b", "a|b>", "<a|<b>"):
        with pytest.raises(ValueError, match="do not match"):
            parse(wrong)
    for meaning in MACROS.values():
        parse(meaning)


def test_variations_keep_the_values():
    for phrases in PHRASES:
        rng = random.Random(1)
        for _ in range(60):
            template = phrases.template(rng.random, "train")
            slots = sorted(re.findall(r"\{(\w+)\}", template))
            assert sorted(re.findall(r"\{(\w+)\}", vary(template, rng.random))) == slots
            assert not set("<>@") & set(template) and "{" not in re.sub(r"\{\w+\}", "", template), template


def test_phrasings_are_many_and_none_holds_one_of_evaluation():
    assert len(PHRASES) > 150
    for phrases in PHRASES:
        rng = random.Random(2)
        found = {bare(phrases.template(rng.random, "train")) for _ in range(150)}
        assert len(found) > 15 or not phrases.of["eval"], (len(found), phrases.of)
        for text in phrases.of["eval"]:
            known = bare(text)
            assert known not in found, text
            assert len(known.split()) < 3 or not any(known in other for other in found), text


def test_no_sentence_of_evaluation_in_rendered_training():
    """Sentence by sentence, with anything for the values, within a kind."""
    kinds = {"arithmetic": arithmetic, "lookup": lookup, "json": fill_task, "choose": choose, "recall": recall}
    values = {"n": r"\d+", "e": r"[\d ()*+-]+", "t": "[a-z]+", "p": "[A-Z][a-z]+", "q": "[A-Z][a-z]+", "k": r"\w+"}

    def pattern(text):
        found = re.split(r"\{(\w+)\}", text)
        found[::2] = map(re.escape, found[::2])
        found[1::2] = [values.get(key, r"[\w@]+(?: [\w@]+){0,2}?") for key in found[1::2]]
        return re.compile("".join(found))

    wanted = {
        kind: {
            pattern(text)
            for phrases in PHRASES
            if phrases not in (lookup.MORE_NEAR, lookup.MORE_QUESTIONS)  # training's; their second list is a guard
            for text in phrases.of["eval"]
            if any(phrases is own for thing in vars(module).values() for own in phrases_of(thing))
            and len(re.sub(r"\{\w+\}", "", text).split()) >= 3
        }
        for kind, module in kinds.items()
    }
    assert sum(map(len, wanted.values())) > 60
    seen = {kind: set() for kind in kinds}
    for kind, text in rendered(250, kinds):
        assert kind != "json" or not re.search(r"\band the \w+ is \w", text, re.IGNORECASE), text  # joined sentences
        seen[kind].update(part + end for part, end in re.findall(r"([^.?!\n]+)([.?!\n]|$)", text))
    for kind, patterns in wanted.items():
        for sentence in seen[kind]:
            assert not any(known.fullmatch(sentence.strip()) for known in patterns), (kind, sentence)


def test_training_knows_every_word_of_evaluation():
    """A word that training never has could only be guessed at."""
    known = set()
    for _, text in rendered(600, [kind for kind in TAGS if kind != "recall_several"]):
        known.update(re.findall(r"[a-z]+", text.lower()))
    for phrases in PHRASES:
        for text in phrases.of["eval"]:
            words = re.findall(r"[a-z]+", re.sub(r"\{\w+\}", " ", text).lower())
            assert known.issuperset(words), (text, set(words) - known)


def asked_of(example):
    return "\n".join(message["content"] for message in example.messages)


def test_training_tells_what_it_asks_for():
    """The values of gold answers stand in the prompt, letter by letter, whatever stands around them."""
    for tag in TAGS["json"]:
        for seed in range(300):
            item = make("json", tag, seed, "train")
            for key, value in json.loads(item.gold[0]["content"]).items():
                assert key in asked_of(item)
                shown = ("urgent" if value else "not urgent") if isinstance(value, bool) else str(value)
                assert (shown in asked_of(item)) or (shown in asked_of(item).lower() and isinstance(value, bool)), item
    for tag in ("1", "3", "6", "two"):
        for seed in range(300):
            item = make("tools", tag, seed, "train")
            for _, arguments in item.gold_result()[1]:
                assert all(str(value) in item.messages[-1]["content"] for value in arguments.values()), item
    for seed in range(200):
        item = make("recall", "256", seed, "train")
        answer = item.gold[0]["content"]
        value = answer.removesuffix(".").split(" is ")[-1]
        assert value in asked_of(item), item
