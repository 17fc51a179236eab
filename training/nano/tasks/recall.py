"""Facts recalled from a context of notes, needles among others of their kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from training.nano.tasks.example import Call, Example, Message, mentions, says, system, user
from training.nano.tasks.phrases import Phrases, fill
from training.nano.tasks.words import DAYS, GIVEN, Words

CHARS_PER_TOKEN = {"train": 2.05, "eval": 2.22}
"""Of notes, with this model's tokenizer; the more phrasings, the fewer."""
ATTRIBUTES = {
    "access code": "code",
    "key number": "code",
    "room number": "code",
    "password": "word",
    "owner": "person",
    "keeper": "person",
    "secret word": "word",
    "guard": "person",
}
MORE_ATTRIBUTES = ATTRIBUTES | {
    "door code": "code",
    "locker number": "code",
    "captain": "person",
    "manager": "person",
    "nickname": "word",
    "motto": "word",
    "sign": "name",
    "partner": "name",
}
"""Of training."""
STATEMENTS = Phrases(
    [
        "The {a} of {s} is {v}.",
        "{S} has the {a} {v}.",
        "{v} is the {a} of {s}.",
        "The {a} for {s} is {v}.",
        "{S} uses {v} as its {a}.",
        "Note that the {a} of {s} is {v}.",
        "We know that the {a} of {s} is {v}.",
        "For {s}, the {a} is {v}.",
        "@thatthe {a} <of|of|of|for|at|in|belonging to> {s} @is {v}@end",
        "@thatthe {a} <of|of|for> {s} @is {v}.",
        "@that{s} <has|keeps|had|got|holds|carries|uses|owns|gets|shows> <the|the|a|this> {a} {v}@end",
        "@that{v} <is|was|serves as|acts as|remains|will be> the {a} <of|for|at|in> {s}@end",
        "<for|at|in|about|regarding|as for|with> {s}<,|> <the {a}|its {a}|the right {a}> @is {v}@end",
        "<for|at|in|as for> {s}<,|> <we have|use|take|you need|they use|remember|note> the {a} {v}@end",
        "{s}<: | - |, >{a} <|is |= |: >{v}@end",
        "{a} <of|for|at> {s}<: | = | - | is >{v}@end",
        "@that{s}'s {a} @is {v}@end",
        "<they gave|we gave|somebody gave|he gave> {s} <the {a} {v}|{v} as <its|the|a> {a}|{v} for a {a}>@end",
        "@that{s} <uses|took|keeps|chose|shows|got|wants|needs|had|calls> {v} <as|for> <its|the|their|a> {a}@end",
        "@thatthe {a} <which|that> <belongs to|you need for|you find at|they use at|was given to|is used by> "
        "{s} @is {v}@end",
        "@thatthe {a} <which {s} has|{s} has|that {s} got|that {s} needs|which {s} uses|{s} uses|that {s} had> "
        "@is {v}@end",
        "<if you need|if you want|whoever wants|to have> the {a} of {s}, <it is|take|use|say|write> {v}@end",
        "{s} <has|had|got|uses> {v}, <that is|and that is|which is|this is|and this is> <its|the> {a}@end",
        "{s} (<{a} {v}|{a}: {v}|{v} is the {a}|the {a} is {v}>)@end",
        "{s} has a {a}<: it is|, namely|, which is|, and it is|:> {v}@end",
        "@that{v} <belongs to {s} as|is what {s} has as|is used by {s} as|was given to {s} as> <its|the> {a}@end",
    ],
    ["Remember that the {a} of {s} is {v}.", "The {a} that {s} has is {v}.", "{S} has {v} as its {a}."],
)
FILLERS = Phrases(
    [
        "The rain fell on {s} all day.",
        "Nobody came to {s} on {d}.",
        "{p} walked to {s} and sat down.",
        "A letter for {p} came on {d}.",
        "{p} likes to read about {s}.",
        "On {d} the sun was shining.",
        "{p} and a friend talked about {s}.",
        "<on {d}|yesterday|today|later|in the morning|last week>, {p} <came to|went to|saw|left|painted|"
        "cleaned> {s}@end",
        "{p} <met|saw|called|knows|likes|visited> a friend <of {p}|at {s}|on {d}|near {s}>@end",
        "<nobody|everybody|somebody|a friend|a guest> <likes|came to|knows|saw|talked about|looked at> {s}@end",
        "it <rained|snowed|was cold|was warm|was quiet> <on {d}|at {s}|near {s}|all day>@end",
        "<there was|there is> <a letter|a cat|snow|nothing new|a song|music|bread> <at|for|near> <{s}|{p}>@end",
    ],
    ["On {d} it rained on {s}.", "{p} sat down and talked about {s}.", "A friend of {p} came to {s}."],
)
QUESTIONS = Phrases(
    [
        "What is the {a} of {s}?",
        "Tell me the {a} of {s}.",
        "Which {a} does {s} have?",
        "Please give the {a} of {s}.",
        "I need the {a} of {s}.",
        "Say the {a} of {s}.",
        "Do you remember the {a} of {s}?",
        "@tell the {a} <of|of|of|of|for|at|in|belonging to> {s}@end",
        "@tell the {a} <of|of|for> {s}?",
        "@tell the {a} <that|which> {s} <has|uses|got|needs|keeps|had>@end",
        "@tell {s}'s {a}@end",
        "@know what the {a} of {s} is@end",
        "@know <which|what> {a} {s} <has|uses|got|needs|keeps|had>@end",
        "<which|which|what> {a} <does|did|would> {s} <have|use|keep|need|carry|hold|want|own|get>?",
        "<which|what> {a} <is that of|is used at|is used by|is given for|belongs to|goes with|is noted for> {s}?",
        "<for|as for|about|at|regarding> {s}<,|:> <what is the {a}|which {a} is it|the {a}|what {a} is noted>?",
        "{s}<: |, ><what is its {a}|which {a}|the {a}|{a}>?",
        "<and |so |>the {a} of {s}?",
        "{a} of {s}?",
        "what do <the notes|we|you|they> <say about|know about|have as> the {a} of {s}?",
        "<can|could|would|will> you <say|tell me|give me|find|repeat|read out|remember> the {a} <of|for> {s}?",
        "what <is|was> <given|written|noted|said> <as|about> the {a} of {s}?",
    ],
    ["Give me the {a} of {s}.", "What {a} does {s} have?", "Do you know the {a} of {s}?"],
)
MANY = Phrases(
    [
        "What are {list}?",
        "Tell me {list}.",
        "Please give {list}.",
        "I need {list}.",
        "Say {list}.",
        "@tell {list}@end",
        "@tell {list}.",
        "<can|could|would|will> you <say|tell me|give me|find|repeat|list> {list}?",
        "<list|name|write down|answer with|now> {list}@end",
        "what do <the notes|we|you> know about {list}?",
    ],
    ["Give me {list}.", "Do you know {list}?"],
)
BRIEF = Phrases(
    [
        "Answer with the value only.",
        "Just the value.",
        "Only the value, please.",
        "<say|write|answer with|reply with|name|tell me> <only|just|nothing but> the value@end",
        "<no sentence|no more words>, <just|only> the value@end",
        "the value <alone|and nothing else|is enough>@end",
    ],
    ["Give only the value.", "The value only, please."],
)
INTROS = Phrases(
    [
        "Here are the notes.",
        "Notes:",
        "Read these notes.",
        "You answer questions about these notes.",
        "Remember this text.",
        "<here are|these are|read|look at|keep|you have|take> <the|these|some|my|our> <notes|lines|facts|"
        "sentences>@end",
        "<read|keep|learn|use> <the|this|my> text@end",
        "<notes|text|facts|what we know|the notes|my notes>:",
        "",
        "answer <from|by|with the help of> <these notes|the notes|this text|the text>@end",
    ],
    ["Remember these notes.", "Here is the text."],
)
MISSING = "The notes do not say."


class Fact(NamedTuple):
    """The attribute of a subject: "the access code of the blue harbor is 4817"."""

    attribute: str
    subject: str
    value: str

    @property
    def sentence(self) -> str:
        return f"The {self.attribute} of {self.subject} is {self.value}."


def facts_for(w: Words, count: int) -> list[Fact]:
    """Facts of few attributes, each of a subject's once, no two with the same value."""
    makers = dict(MORE_ATTRIBUTES if w.training else ATTRIBUTES)
    attributes = w.some(list(makers), w.between(1, 3))
    if w.training and w.chance(0.25):
        attributes[0] = w.word()
        makers[attributes[0]] = w.pick(("code", "word", "person", "name"))
    found: dict[tuple[str, str], Fact] = {}
    values: set[str] = set()
    while len(found) < count:
        subject = f"the {w.place()}" if w.chance(0.65) else w.name()
        for attribute in attributes if w.chance(0.3) else [w.pick(attributes)]:
            value = getattr(w, makers[attribute])()
            if (attribute, subject) in found or value in values:
                continue
            values.add(value)
            found[attribute, subject] = Fact(attribute, subject, value)
    facts = list(found.values())
    w.rng.shuffle(facts)
    return facts


def _ways(w: Words) -> Sequence[str]:
    """The ways in which one text tells its facts: one, some or all."""
    if w.training:
        return [STATEMENTS.template(w.random, w.split) for _ in range(w.pick((1, 1, 3, 60)))]
    templates = STATEMENTS.of["eval"]
    return [w.pick(templates)] if w.chance(0.4) else templates


def notes(w: Words, tokens: int) -> tuple[str, list[Fact]]:
    """A text of about so many tokens, and the facts in it."""
    wanted = (tokens - 40) * CHARS_PER_TOKEN[w.split]
    filler_share = w.pick((0.0, 0.1, 0.4))
    templates = _ways(w)
    sentences, facts, size = [], [], 0
    supply = iter(facts_for(w, max(3, int(wanted / 32))))
    while size < wanted or len(facts) < 3:
        if w.chance(filler_share):
            text = w.say(FILLERS, s=f"the {w.place()}", d=w.pick(DAYS), p=w.pick(GIVEN))
        else:
            fact = next(supply, None)
            if fact is None:
                break
            facts.append(fact)
            text = fill(w.pick(templates), {"a": fact.attribute, "s": fact.subject, "v": fact.value})
        sentences.append(text)
        size += len(text) + 1
    return w.pick((" ", "\n")).join(sentences), facts


def ask(w: Words, facts: list[Fact], count: int, missing: bool = False) -> tuple[str, str, list[str]]:
    """A question for `count` facts, its answer, and the values that the answer must hold."""
    if missing:
        known = {(fact.attribute, fact.subject) for fact in facts}
        attribute = w.pick(facts).attribute
        subject = f"the {w.place()}" if w.chance(0.6) else w.name()
        if (attribute, subject) not in known:
            return w.say(QUESTIONS, a=attribute, s=subject), MISSING, []
    wanted = w.some(facts, min(count, len(facts)))
    values = [fact.value for fact in wanted]
    if len(wanted) == 1:
        question = w.say(QUESTIONS, a=wanted[0].attribute, s=wanted[0].subject)
        if w.chance(0.2):
            return f"{question} {w.say(BRIEF)}", values[0], values
        return question, wanted[0].sentence, values
    listed = [f"the {fact.attribute} of {fact.subject}" for fact in wanted]
    if w.training and w.chance(0.2):
        listed = [f"{fact.subject}'s {fact.attribute}" for fact in wanted]
    question = w.say(MANY, list=", ".join(listed[:-1]) + " and " + listed[-1])
    return question, " ".join(fact.sentence for fact in wanted), values


def make(w: Words, tag: str, count: int = 1, turns: int = 1) -> Example:
    """A context of `tag` tokens and a question for `count` facts; in training, more questions after it."""
    text, facts = notes(w, int(tag))
    question, answer, values = ask(w, facts, count, missing=turns > 1 and w.chance(0.06))
    intro = w.say(INTROS)
    in_system = w.chance(0.6)
    if in_system:
        messages = [*system(f"{intro}\n{text}".strip()), user(question)]
    else:
        messages = [user(f"{intro}\n{text}\n\n{question}".strip())]
    gold: list[Message] = [says(answer)]
    for _ in range(turns - 1):
        asked, said, _ = ask(w, facts, w.pick((1, 1, 1, count)), missing=w.chance(0.06))
        gold += [user(asked), says(said)]
    return Example(
        kind="recall" if count == 1 else "recall_several",
        tag=tag,
        messages=messages,
        gold=gold,
        check=_checker(values, [fact.value for fact in facts]),
    )


def _checker(values: list[str], all_values: list[str]) -> Callable[[str, Sequence[Call]], bool]:
    others = set(all_values) - set(values)

    def check(text: str, calls: Sequence[Call]) -> bool:
        if not values:
            return text.strip() == MISSING
        places = [text.find(value) for value in values]
        in_order = -1 not in places and places == sorted(places) and all(mentions(text, value) for value in values)
        return in_order and not any(mentions(text, value) for value in others)

    return check
