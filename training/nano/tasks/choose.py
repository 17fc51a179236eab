"""Which of these is right: by a fact of the context, by comparing numbers, by a simple sum; the answer is a label."""

from __future__ import annotations

from typing import NamedTuple

from training.nano.tasks.example import Example, Message, says, system, user
from training.nano.tasks.recall import Fact, notes
from training.nano.tasks.words import Phrases, Words, split_of

LABELS = (("A", "B", "C", "D"), ("1", "2", "3", "4"))
MORE_LABELS = (*LABELS, *LABELS, ("a", "b", "c", "d"), ("P", "Q", "R", "S"), ("one", "two", "three", "four"))
FORMS = ("{l}: {o}", "{l}) {o}", "Thought {l}: {o}")
MORE_FORMS = (*FORMS, "({l}) {o}", "{l}. {o}", "{l} - {o}", "Option {l}: {o}", "{l} = {o}", "{l}\n{o}", "* {l}: {o}")
SYSTEMS = Phrases(
    [
        "",
        "You are a helpful assistant.",
        "You judge thoughts.",
        "Choose what is right. Answer with a label.",
        "<you are|act as|be> <a|a fair|an honest|a good> <judge|referee|assistant|agent>@end",
        "<choose|pick|select|find|name> <what is right|the right label|the right option|one option>@end",
    ],
    ["You choose what is right.", "You are a helpful judge."],
)
WHICH = Phrases(
    [
        "Which of these is right?",
        "Which thought is right?",
        "Which one is right?",
        "Choose the right one.",
        "<which|which one|what> <|of them |of the thoughts |of the options |here ><is|could be|must be> <right|"
        "true|correct>?",
        "<choose|pick|select|find|name|mark> <the right|the true|the correct> <one|option|line|label|sentence|"
        "answer>@end",
        "@know <which|which one|which line|which thought> is <true|right|correct>@end",
        "<only one|one|one of these> is <right|true|correct>. Which<| one| is it>?",
        "<the right one is|right is>?",
    ],
    ["Which of these thoughts is right?", "Choose the right thought."],
)
HOW = Phrases(
    [
        "Answer with {l}.",
        "Say {l}.",
        "Answer only with {l}.",
        "<answer|reply|respond|come back> <by|with> <|just |only |one of >{l}@end",
        "<write|give|name> <|just |only >{l}@end",
        "<your answer|the answer|the reply> is <|one of >{l}@end",
        "{l}?",
        "<|only >the label<|, please>: {l}@end",
    ],
    ["Say only {l}.", "Just answer with {l}."],
)
LARGER = Phrases(
    [
        "Which number is larger?",
        "Which is the largest number?",
        "Choose the largest number.",
        "<which|what> <is|of these is|here is|one is> the <largest|greatest|biggest|highest|larger>< number| "
        "one| of them|>?",
        "<choose|pick|select|find|mark> the <greatest|biggest|highest|largest|larger> <one|of them|value|number>@end",
        "@know which <is|number is|one is> <larger|bigger|greater|the greatest|the biggest|the largest of all>@end",
    ],
    ["Which number is the largest?", "Choose the larger number."],
)
SMALLER = Phrases(
    [
        "Which number is smaller?",
        "Which is the smallest number?",
        "Choose the smallest number.",
        "<which|what> <is|of these is|here is|one is> the <smallest|least|lowest|smaller|tiniest>< number| one| "
        "of them|>?",
        "<choose|pick|select|find|mark> the <least|lowest|smallest|smaller> <one|of them|value|number>@end",
        "@know which <is|number is|one is> <smaller|lower|less|the least|the lowest|the smallest of all>@end",
    ],
    ["Which number is the smallest?", "Choose the smaller number."],
)
WORDS = Phrases(
    [
        "The word is {v}.",
        "We look for {v}.",
        "The right word is {v}.",
        "It must be {v}.",
        "@that<the word|it|the right one|the answer|what we want|the one|the thing> @is {v}@end",
        "<we|I|they|all> <want|need|seek|like|look for|ask for|mean|take|chose> {v}@end",
        "<take|find|look for|remember|choose> {v}@end",
        "{v} is <right|true|what we want|the word|it|the one|needed>@end",
        "<word|wanted|right|key>: {v}@end",
    ],
    ["We look for the word {v}.", "The one that we need is {v}."],
)
RIGHT = Phrases(
    [
        "Is it right that {t}?",
        "Is this right: {t}?",
        "Right or not: {t}?",
        "<is|was> it <right|true|correct|really so|a fact> that {t}?",
        "<true|right|correct><| or not| or false>: {t}?",
        "<I heard|they say|somebody says|we think|I think> that {t}. Is <that|it> <so|right|true>?",
        "@know <if|whether> {t}@end",
        "@know <if|whether> it is <true|so|correct> that {t}@end",
        "{t}. <True|Right|Correct|Is it so>?",
    ],
    ["Is it so that {t}?", "Tell me if it is right that {t}."],
)
THINK = Phrases(
    [
        "think first@end",
        "<think|reason|say why> <first|before you answer>, then <answer|choose>@end",
        "<say why|give a reason> first@end",
    ],
    [],
)
"""Of training: the answer comes after a thought."""
OPTION = Phrases(
    [
        "what is {l}?",
        "what <stands|is written|do you see> <at|behind|under> {l}?",
        "@do<repeat|read|say|write> {l}@end",
        "<thought|option|line> {l}<| is>?",
    ],
    [],
)
LABEL = Phrases(
    [
        "<which|what> label has {o}?",
        "<where|under which label> is {o}?",
        "<find|name> the label of {o}@end",
        "{o} is <which|at which label>?",
    ],
    [],
)
"""Of training: the way from labels to options and back."""
SUM = Phrases(
    [
        "<|now |so ><what is|how much is|what do you get for|say> {t}?",
        "{t}<| =| = ?|?>",
        "<compute|work out|say> {t}@end",
    ],
    [],
    varied=False,
)
"""Of training: a sum alone, which is what choosing among sums needs."""
YES_NO = Phrases(
    [
        "Answer yes or no.",
        "Say yes or no.",
        "<answer|reply|say|respond> <|with |by ><|only |just |a simple >yes or no@end",
        "yes or no?",
        "<only|just|simply> <say|answer|reply> yes or no@end",
    ],
    ["Just yes or no.", "Only yes or no."],
)


class Question(NamedTuple):
    """options: the right one first. thought: why it is right."""

    text: str
    options: list[str]
    thought: str


class Round(NamedTuple):
    """What is asked and answered."""

    text: str
    answer: str
    labels: tuple[str, ...]
    listed: tuple[str, ...] = ()


def make(w: Words, tag: str, turns: int = 1) -> Example:
    """tag: "recall", "compare", "sum", "copy" or "yesno". In training, more questions, one after the other."""
    with_notes = tag == "recall" or tag == "yesno" and w.chance(0.7)
    sizes = (160, 240, 400) if tag == "recall" else (160, 240)
    text, facts = notes(w, w.pick(sizes)) if with_notes else ("", [])
    first = _round(w, tag, facts)
    asked = f"{text}\n\n{first.text}" if text else first.text
    gold: list[Message] = [says(first.answer)]
    last = first
    for _ in range(turns - 1):
        if tag in ("sum", "yesno") and w.chance(0.3 if tag == "sum" else 0.1):
            sum_text, result = _sum(w)
            question, answer = w.say(SUM, t=sum_text), str(result)
        elif last.listed and w.chance(0.3):
            question, answer = _about_labels(w, last)
        else:
            last = _round(w, tag, facts)
            question, answer = last.text, last.answer
        gold += [user(question), says(answer)]
    right = first.answer
    return Example(
        kind="choose",
        tag=tag,
        messages=[*system(w.say(SYSTEMS)), user(asked)],
        gold=gold,
        check=lambda said, calls: not calls and said.strip() == right,
        choices=first.labels,
    )


def _round(w: Words, tag: str, facts: list[Fact]) -> Round:
    if tag == "yesno":
        return _yes_or_no(w, facts)
    count = w.between(2, 4)
    question = _facts(w, facts, count) if facts else {"compare": _numbers, "sum": _sums, "copy": _copies}[tag](w, count)
    options = question.options
    count, right = len(options), options[0]
    w.rng.shuffle(options)
    labels = w.pick(MORE_LABELS if w.training else LABELS)[:count]
    shown = w.some(labels, count) if w.training and w.chance(0.15) else labels
    form = w.pick(MORE_FORMS if w.training else FORMS)
    pairs = zip(shown, options, strict=True)
    listed = w.pick(("\n", "\n", "\n", ", ", "; ") if w.training else ("\n",)).join(
        form.replace("{l}", label).replace("{o}", option) for label, option in pairs
    )
    how = w.say(HOW, l=", ".join(labels[:-1]) + " or " + labels[-1])
    answer = shown[options.index(right)]
    parts = [question.text, listed, how]
    if w.training and w.chance(0.2):
        parts[2] = w.say(THINK) if w.chance(0.7) else f"{how} {w.say(THINK)}"
        return Round("\n".join(parts), f"{question.thought} That is {answer}.", labels, (*shown, *options))
    if w.training and w.chance(0.15):
        parts = w.pick((parts[:2], [how, *parts[:2]], [parts[1], parts[0], how]))
    return Round("\n".join(parts), answer, labels, (*shown, *options))


def _about_labels(w: Words, last: Round) -> tuple[str, str]:
    count = len(last.listed) // 2
    i = w.between(0, count - 1)
    label, option = last.listed[i], last.listed[count + i]
    if w.chance(0.5):
        return w.say(OPTION, l=label), option
    return w.say(LABEL, o=option.removesuffix(".")), label


def _facts(w: Words, facts: list[Fact], count: int) -> Question:
    """Statements of which the notes say one; the others have another fact's value, or an invented one."""
    fact = w.pick(facts)
    others = [f.value for f in facts if f.attribute == fact.attribute and f.value != fact.value]
    w.rng.shuffle(others)
    while len(others) < count - 1:
        invented = (
            w.code(len(fact.value)) if fact.value.isdigit() else w.name() if fact.value[0].isupper() else w.word()
        )
        if invented != fact.value and invented not in others:
            others.append(invented)
    wrong = [fact._replace(value=value).sentence for value in others[: count - 1]]
    return Question(w.say(WHICH), [fact.sentence, *wrong], fact.sentence)


def _numbers(w: Words, count: int) -> Question:
    digits = w.between(2, 4)
    easy = w.training and w.chance(0.4)
    if easy:
        count = min(count, 3) if w.chance(0.5) else count
    found: set[int] = set()
    while len(found) < count:
        found.add(int(w.code(w.between(1, 3) if easy else digits)))
    values = sorted(found, reverse=True)
    larger = w.chance(0.5)
    ordered = [str(n) for n in (values if larger else values[::-1])]
    return Question(
        w.say(LARGER if larger else SMALLER), ordered, f"{ordered[0]} is the {'largest' if larger else 'smallest'}."
    )


def _sum(w: Words) -> tuple[str, int]:
    """A sum or difference of this split's numbers, and its result."""
    most = w.pick((9, 20, 60)) if w.training else 60
    while True:
        a, b = w.between(2, most), w.between(2, min(39, most))
        text, result = (f"{a} + {b}", a + b) if w.chance(0.6) or a <= b else (f"{a} - {b}", a - b)
        if split_of(text) == w.split:
            return text, result


def _near(w: Words, result: int, count: int) -> list[int]:
    wrong: list[int] = []
    while len(wrong) < count:
        value = result + w.pick((-11, -10, -9, -5, -3, -2, -1, 1, 2, 3, 5, 9, 10, 11))
        if value > 0 and value not in wrong:
            wrong.append(value)
    return wrong


def _sums(w: Words, count: int) -> Question:
    text, result = _sum(w)
    options = [f"{text} = {n}" for n in (result, *_near(w, result, count - 1))]
    return Question(w.say(WHICH), options, f"{options[0]}.")


def _copies(w: Words, count: int) -> Question:
    maker = w.pick(("word", "name", "place", "code"))
    options = w.distinct(maker, count)
    told, question = w.say(WORDS, v=options[0]), w.say(WHICH)
    return Question(f"{told}\n\n{question}", options, f"The word is {options[0]}.")


def _yes_or_no(w: Words, facts: list[Fact]) -> Round:
    right = w.chance(0.5)
    if facts:
        fact = w.pick(facts)
        thought = fact.sentence
        if not right:
            others = [f.value for f in facts if f.attribute == fact.attribute and f.value != fact.value]
            fact = fact._replace(value=w.pick(others) if others else w.code() if fact.value.isdigit() else w.word())
        claim = fact.sentence[0].lower() + fact.sentence[1:-1]
    else:
        text, result = _sum(w)
        claim, thought = f"{text} = {result if right else _near(w, result, 1)[0]}", f"{text} = {result}."
    asked, answer = w.say(RIGHT, t=claim), "yes" if right else "no"
    if w.training and w.chance(0.2):
        return Round(f"{asked} {w.say(THINK)}", f"{thought} So {answer}.", ("yes", "no"))
    return Round(f"{asked} {w.say(YES_NO)}", answer, ("yes", "no"))
