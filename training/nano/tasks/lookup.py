"""Looking things up in a small table by a tool: what is found first is the key to look up next."""

from __future__ import annotations

from typing import Any, NamedTuple

from training.nano.tasks.example import Call, Example, Message, calls, mentions, replies, says, system, tool, user
from training.nano.tasks.toolbox import toolbox
from training.nano.tasks.words import Phrases, Words


class Relation(NamedTuple):
    """X has a `first` (a team), which has a `second` (a leader). makers: of X, of the first, of the second."""

    kind: str
    first: str
    second: str
    makers: tuple[str, str, str]
    questions: Phrases
    near: Phrases


RELATIONS = (
    Relation(
        "person", "team", "leader", ("person", "name", "person"),
        Phrases(
            ["Who leads the team that {x} is in?", "Who leads the team of {x}?",
             "@know who leads the team <in which {x} is|where {x} is|with {x}>@end",
             "{x} is in a team<. |, ><who leads it|who is its leader>?"],
            ["Who is the leader of the team that {x} is in?", "Tell me who leads the team of {x}."],
        ),
        Phrases(["In which team is {x}?", "What is the team of {x}?"], ["Which team is {x} in?"]),
    ),
    Relation(
        "city", "country", "capital", ("name", "name", "name"),
        Phrases(
            ["What is the capital of the country that {x} is in?", "Which city is the capital of the country of {x}?",
             "@tell the capital of the country <where {x} is|around {x}|that {x} belongs to>@end",
             "{x} is in a country<. |, ><what is its capital|which capital has it>?"],
            ["What is the capital of the country of {x}?"],
        ),
        Phrases(["In which country is {x}?", "What is the country of {x}?"], ["Which country is {x} in?"]),
    ),
    Relation(
        "book", "author", "town", ("name", "person", "name"),
        Phrases(
            ["In which town does the author of {x} live?", "What is the town of the author of {x}?",
             "@know <where|in which town|in what town> the author of {x} lives@end",
             "<where|in what town|what town> does <the author|the writer> of {x} <live|live in>?"],
            ["Which town does the author of {x} live in?"],
        ),
        Phrases(["Who is the author of {x}?", "Who wrote {x}?",
        "@know who <wrote|is the author of> {x}@end"], ["Tell me the author of {x}."]),
    ),
    Relation(
        "product", "factory", "manager", ("name", "name", "person"),
        Phrases(
            ["Who is the manager of the factory that makes {x}?", "Who manages the factory of {x}?",
             "@know who manages the factory <that makes {x}|where {x} is made|of {x}>@end"],
            ["Who is the manager of the factory of {x}?"],
        ),
        Phrases(["Which factory makes {x}?", "What is the factory of {x}?"], ["Tell me the factory that makes {x}."]),
    ),
    Relation(
        "ship", "harbor", "keeper", ("name", "name", "person"),
        Phrases(
            ["Who is the keeper of the harbor of {x}?", "Who keeps the harbor that {x} is in?",
             "@know who keeps the harbor <where {x} is|of {x}|with {x}>@end"],
            ["Who is the keeper of the harbor that {x} is in?"],
        ),
        Phrases(["In which harbor is {x}?", "What is the harbor of {x}?"], ["Which harbor is {x} in?"]),
    ),
    Relation(
        "room", "floor", "guard", ("name", "name", "person"),
        Phrases(
            ["Who is the guard of the floor of {x}?", "Who guards the floor that {x} is on?",
             "@know who guards the floor <where {x} is|of {x}|with {x}>@end"],
            ["Who is the guard of the floor that {x} is on?"],
        ),
        Phrases(["On which floor is {x}?", "What is the floor of {x}?"], ["Which floor is {x} on?"]),
    ),
)  # fmt: skip
SYSTEMS = Phrases(
    [
        "",
        "You are a helpful assistant.",
        "Look it up with the tools.",
        "You are an agent. Look things up, one call at a time.",
        "<look it up|look everything up|find it|search> <with|by|in> the <tool|table|tools|data>@end",
        "<you are|act as|be> <a helpful|an|a careful|a small> <worker|assistant|helper><|. Use the tools|. One "
        "step at a time>@end",
        "<answer|reply> <from|with the help of|by> the <table|tools|tool>@end",
    ],
    ["You are an agent. Look it up with the tools.", "Look things up with the tool."],
)
NAMES = ("lookup", "look_up", "table", "find", "get")
KEYS, FIELDS = ("key", "name", "of", "entry"), ("field", "column", "what")
UNKNOWN = "not found"
MORE_NEAR = Phrases(
    [
        "@tell the {f} of {x}@end",
        "@tell the {f} <for|that belongs to|which belongs to> {x}@end",
        "<what|which> is the {f} of {x}?",
        "which {f} <does {x} have|has {x}|belongs to {x}|is that of {x}>?",
        "{x}<: |, ><which {f}|the {f}|what is the {f}>?",
        "@know which {f} {x} <has|belongs to>@end",
    ],
    ["Tell me the {f} of {x}.", "Tell me the {f} that makes {x}.", "Which {f} is {x} in?"],
)
MORE_QUESTIONS = Phrases(
    [
        "@tell the {g} of the {f} of {x}@end",
        "@tell the {g} of the {f} <that {x} has|which {x} has|that belongs to {x}|where {x} is>@end",
        "<what|who|which> is the {g} of the {f} of {x}?",
        "{x} has a {f}<: |. |, ><what|who> is <its {g}|the {g} of that {f}|the {g} there>?",
        "<think of|take> the {f} of {x}<: |. ><what|who> is its {g}?",
        "@know <which|what> {g} the {f} of {x} has@end",
        "<who|what> <is|was> {g} <of|at|in|for> the {f} of {x}?",
    ],
    [
        "Who is the {g} of the {f} that {x} is in?",
        "What is the {g} of the {f} of {x}?",
        "Who is the {g} of the {f} of {x}?",
        "Who is the {g} of the {f} that {x} is on?",
    ],
)
"""Of training, for any relation."""
PAIRS = "team boss house owner school teacher club coach shop clerk farm king street mayor car driver dog vet".split()


def _any_relation(w: Words) -> Relation:
    """One of invented words or of words that know no relation of evaluation."""
    kind, first, second = (w.word() if w.chance(0.4) else w.pick(PAIRS) for _ in range(3))
    if len({kind, first, second}) < 3:
        return w.pick(RELATIONS)
    makers = tuple(w.pick(("name", "person", "name")) for _ in range(3))
    return Relation(kind, first, second, makers, MORE_QUESTIONS, MORE_NEAR)


def make(w: Words, tag: str) -> Example:
    """tag: "1" or "2" hops."""
    relation = w.pick(RELATIONS)
    if w.training and w.chance(0.3):
        relation = _any_relation(w)
    rows = w.between(2, 5)
    firsts, seconds = (w.distinct(maker, rows) for maker in relation.makers[1:])
    subjects = w.distinct(relation.makers[0], rows + 1)
    table = {(x, relation.first): w.pick(firsts) for x in subjects}
    table |= {(first, relation.second): second for first, second in zip(firsts, seconds, strict=True)}
    subject = w.pick(subjects)
    found = table[subject, relation.first]
    if tag == "1":
        phrases = MORE_NEAR if w.training and w.chance(0.5) else relation.near
        question, hops = w.say(phrases, f=relation.first, x=subject), [(subject, relation.first)]
        answer = f"The {relation.first} of {subject} is {found}."
    else:
        phrases = MORE_QUESTIONS if w.training and w.chance(0.5) else relation.questions
        question = w.say(phrases, f=relation.first, g=relation.second, x=subject)
        hops = [(subject, relation.first), (found, relation.second)]
        answer = f"The {relation.second} of {found} is {table[found, relation.second]}."
    name = w.pick(NAMES) if w.chance(0.8) else w.word()
    key, field = w.pick(KEYS), w.pick(FIELDS)
    single = w.chance(0.55)
    if single:
        fields = [relation.first, relation.second]
        about = f"Looks up a field in a table. Fields: {', '.join(fields)}."
        own = [tool(name, about, {key: "string", field: "string"})]
    else:
        form = w.pick(("{f}_of", "get_{f}", "find_{f}"))
        named = {relation.first: (relation.kind, form), relation.second: (relation.first, form)}
        names = {form.replace("{f}", f): (f, argument) for f, (argument, form) in named.items()}
        own = [tool(n, f"Tells the {f} of a {argument}.", {argument: "string"}) for n, (f, argument) in names.items()]
    others = (
        [bound.definition for bound in toolbox(w, w.between(1, 3), {t["function"]["name"] for t in own})]
        if w.chance(0.35)
        else []
    )
    tools = own + others
    w.rng.shuffle(tools)

    def call(subject: str, wanted: str) -> Call:
        if single:
            return name, {key: subject, field: wanted}
        return next((n, {argument: subject}) for n, (f, argument) in names.items() if f == wanted)

    def run_tool(called: str, arguments: dict[str, Any]) -> str:
        if single and called == name and set(arguments) == {key, field}:
            return table.get((arguments[key], arguments[field]), UNKNOWN)
        if not single and called in names and set(arguments) == {names[called][1]}:
            wanted, argument = names[called]
            return table.get((arguments[argument], wanted), UNKNOWN)
        return f"error: no such call of {called}"

    gold: list[Message] = []
    for i, hop in enumerate(hops):
        made = call(*hop)
        gold += [calls(made, first=i), replies(run_tool(*made), i)]
    gold.append(says(answer))
    right = table[hops[-1]]

    def check(text: str, calls: Any) -> bool:
        return bool(calls) and mentions(text, right)

    return Example("lookup", tag, [*system(w.say(SYSTEMS)), user(question)], gold, check, tools, run_tool)
