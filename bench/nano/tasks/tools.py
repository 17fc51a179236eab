"""Following the system prompt's list of tools: which one, with which arguments, or none."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from bench.nano.tasks.chat import small_talk
from bench.nano.tasks.domains import DOMAINS, Domain
from bench.nano.tasks.example import Call, Example, Message, calls, replies, says, system, tool, user
from bench.nano.tasks.more_domains import MORE_DOMAINS, NEAR
from bench.nano.tasks.words import COLORS, DAYS, GIVEN, LANGUAGES, OBJECTS, THINGS, Phrases, Words, fill

NO_TOOL = "I have no tool for that."
SYSTEMS = Phrases(
    [
        "",
        "",
        "You are a helpful assistant.",
        "You are a helpful assistant. Use the tools.",
        "You are nano, a small agent.",
        "You are an agent with tools.",
        "Use a tool when it helps.",
        "<you are|act as|be> <a helpful|an|a careful|a small|a kind> <worker|assistant|helper><|. Use the tools|"
        ". Call tools>@end",
        "<use|call|work with|choose> <the tools|a tool|the right tool|a fitting tool> <when you can|for what "
        "you are asked|always|with care>@end",
    ],
    ["You are a small agent. Use the tools.", "You are a helpful agent."],
)
SECOND = (" Then ", " Also ", " And then ")
"""Joins two requests."""
MORE_JOINTS = (
    *SECOND, " After that ", ", and then ", " and ", ", and ", " Next ", " And also ", "\n", " ", " Besides, ",
    " Plus, ",
    "; ", " Second, ", " And ", " Afterwards ", " In addition ", "; then ", ", then ", " Finally ",
    " And after that ",
)  # fmt: skip
"""Of training: a small letter follows, except after a space or a line feed alone."""
ASIDES = Phrases(
    [
        "it is {d}@end", "I am {p}@end", "{p} is <here|not here|late|with me>@end",
        "we have <a guest|time|a party|snow>@end",
        "<the sun is shining|it is late|it is dark|it is cold|I have no time|I am tired|I am at home>@end",
        "I <like|saw|have> {c} {t}@end", "<hello|hi|good morning|good day|hey><|, nano|, agent>@end",
        "<I have|here is|there is> a <task|job|request|wish> for you@end",
        "<thanks for your help|this is urgent|quick>@end",
    ],
    [],
)  # fmt: skip
"""Said beside a request."""
NAMING = Phrases(
    ["<use|call|take|with|by> {n}: ", "<use|call|take|run> <the tool |>{n}. ", "<use|call> {n} for this: ", "{n}: "], []
)
"""Before a request, naming the tool."""
DONE = "Done."


class Bound(NamedTuple):
    """A tool of an example, and what a request to it needs."""

    domain: Domain | None
    name: str
    description: str
    arguments: dict[str, str]
    makers: tuple[str, ...]
    verb: str = ""

    @property
    def definition(self) -> dict[str, Any]:
        return tool(self.name, self.description, self.arguments)


def value_of(w: Words, maker: str) -> str | int:
    if maker == "hour":
        return w.between(1, 23)
    if maker == "count":
        return w.between(2, 99)
    lists = {"day": DAYS, "language": LANGUAGES, "color": COLORS, "item": THINGS}
    if maker in lists:
        return w.pick(lists[maker])
    if maker == "device":
        return w.pick(OBJECTS) if w.chance(0.3) else f"{w.word()} {w.pick(OBJECTS)}"
    if maker == "someone":
        return w.pick(GIVEN) if w.chance(0.3) else w.person()
    if maker == "file":
        return f"{w.word()}.{w.pick(('txt', 'md', 'py', 'csv'))}"
    return {"city": w.name, "name": w.name, "text": w.text}[maker]()


def bind(w: Words, domain: Domain) -> Bound:
    """A known tool; one in three has an invented name."""
    name = w.pick(domain.names)
    if w.chance(0.35):
        name = w.word() if w.chance(0.5) else f"{w.word()}_{w.pick(('tool', 'it', 'call', 'get', 'run'))}"
    arguments: dict[str, str] = {}
    for names, kind, _ in domain.arguments:
        own = w.word() if w.training and w.chance(0.08) else ""
        arguments[own or w.pick([n for n in names if n not in arguments])] = kind
    described = w.pick(domain.descriptions)
    if domain.more and w.training and w.chance(0.6):
        described = w.say(domain.more)
    return Bound(domain, name, described, arguments, tuple(maker for *_, maker in domain.arguments))


INVENTED = Phrases(
    [
        "Please {v} {args}.",
        "{V} {args}.",
        "I want you to {v} {args}.",
        "You should {v} {args} now.",
        "@do{v} {args}@end",
        "@do{v} {args}.",
        "I <want|need|have|would like> to {v} {args}@end",
        "<with|for|take> {args}<: |, >{v}@end",
        "<do|make|run|start|I need> a {v} <of|with|for> {args}@end",
        "<remember|do not forget|do it now|here we go>: {v} {args}@end",
    ],
    ["Can you {v} {args}?", "Please {v} {args} now."],
)
PURPOSE = Phrases(
    [
        "<|this tool |this |it >{v}s {args}@end",
        "<to|can|for those who want to|call it to|a tool to|helps to|use this to|will> {v} {args}@end",
        "{v} {args} <with this|by this tool>@end",
    ],
    [],
)
PAIR = Phrases(
    [
        "{k} {x}", "{k} {x}", "the {k} {x}", "{k}: {x}", "{k} = {x}", "{x} as {k}", "{x} as the {k}",
        "{x} for the {k}",
        '{k} "{x}"', "the {k} being {x}", "{k} {x}", "{k} is {x}", "{k}={x}",
    ],
    [],
    varied=False,
)  # fmt: skip


def invent(w: Words) -> Bound:
    """A tool that does what nobody has heard of: to `velmo` a thing."""
    verb = w.word()
    count = w.between(1, 3 if w.training and w.chance(0.2) else 2)
    names = w.distinct("word", count) if w.chance(0.5) else w.some(["thing", "target", "name", "value", "key"], count)
    makers = tuple(w.pick(("text", "name", "code", "count")) for _ in names)
    kinds = {
        name: "integer" if maker in ("code", "count") else "string" for name, maker in zip(names, makers, strict=True)
    }
    name = verb if w.chance(0.5) else w.word()
    described = f"Use it to {verb} {' and '.join(names)}."
    if w.training and w.chance(0.6):
        described = w.say(PURPOSE, v=verb, args=w.pick((" and ", ", ", " with ")).join(names))
    return Bound(None, name, described, kinds, makers, verb)


def request(w: Words, bound: Bound) -> tuple[str, Call]:
    """What a user says, and the call that it asks for."""
    if bound.domain is None:
        values = [int(w.code(w.between(2, 4))) if m == "code" else value_of(w, m) for m in bound.makers]
        pairs = list(zip(bound.arguments, values, strict=True))
        if w.training:
            form, joint = PAIR.template(w.random, w.split), w.pick((" and ", " and ", ", ", " with ", ", and "))
            if w.chance(0.3):
                w.rng.shuffle(pairs)
        else:
            form, joint = "{k} {x}", " and "
        text = w.say(INVENTED, v=bound.verb, args=joint.join(fill(form, {"k": key, "x": x}) for key, x in pairs))
    else:
        values = [value_of(w, maker) for maker in bound.makers]
        text = w.say(bound.domain.requests, **{str(i): value for i, value in enumerate(values)})
    if w.training and w.chance(0.06):
        text = w.say(NAMING, n=bound.name) + text
    return text, (bound.name, dict(zip(bound.arguments, values, strict=True)))


def result_of(w: Words, bound: Bound) -> str:
    if bound.domain is None or not bound.domain.results:
        return "ok"
    text = w.pick(bound.domain.results)
    for key, make in (("{n}", lambda: str(w.between(2, 99))), ("{word}", w.word), ("{code}", lambda: w.code(5))):
        while key in text:
            text = text.replace(key, make(), 1)
    return text


def toolbox(w: Words, count: int, taken: Collection[str] = ()) -> list[Bound]:
    """Tools of different names, none of them `taken`, and different purposes."""
    while True:
        domains = w.some(MORE_DOMAINS if w.training and w.chance(0.5) else DOMAINS, count)
        if w.training and count > 1 and w.chance(0.3):
            pair = w.pick(NEAR)
            domains = [*pair, *(domain for domain in domains if domain not in pair)][:count]
            w.rng.shuffle(domains)
        found = [invent(w) if w.chance(0.25) else bind(w, domain) for domain in domains]
        if len({bound.name for bound in found}.difference(taken)) == count:
            return found


def joined(w: Words, asked: list[tuple[str, Call]]) -> str:
    """Requests one after the other, and in training something beside them."""
    text = asked[0][0]
    for other, (_, values) in asked[1:]:
        joint = w.pick(MORE_JOINTS if w.training else SECOND)
        if joint[0] in ",;" or joint.startswith(" and"):
            text = text.rstrip(".!?")
        is_value = any(str(value).startswith(re.split(r"\W", other, maxsplit=1)[0]) for value in values.values())
        small = joint.strip() and not is_value and not other.startswith("I ")
        text += joint + (other[:1].lower() + other[1:] if small else other)
    if w.training and w.chance(0.12):
        aside = w.say(ASIDES, p=w.pick(GIVEN), d=w.pick(DAYS), c=w.pick(COLORS), t=w.pick(THINGS))
        text = f"{aside} {text}" if w.chance(0.7) else f"{text} {aside}"
    return text


def make(w: Words, tag: str) -> Example:
    """tag: how many tools there are, one of which fits; "two" for two calls in one turn (in training also three),
    "none" if no tool fits."""
    if tag == "none":
        return _no_tool(w)
    count = {"1": 1, "3": w.between(2, 4), "6": w.between(5, 7), "two": w.between(2, 5)}[tag]
    bounds = toolbox(w, count)
    together = 1 if tag != "two" else 3 if w.training and count > 2 and w.chance(0.2) else 2
    asked = [request(w, bound) for bound in w.some(bounds, together)]
    text = joined(w, asked)
    wanted = [call for _, call in asked]
    by_name = {bound.name: bound for bound in bounds}
    results = {name: result_of(w, by_name[name]) for name, _ in wanted}
    gold: list[Message] = [calls(*wanted)]
    gold += [replies(results[name], i) for i, (name, _) in enumerate(wanted)]
    told = [results[name] for name, _ in wanted if results[name] != "ok"]
    gold.append(says(" ".join(f"The result is {result}." for result in told) or DONE))

    def run_tool(name: str, arguments: dict[str, Any]) -> str:
        return results[name] if (name, arguments) in wanted else "error: no such call"

    return Example(
        kind="tools",
        tag=tag,
        messages=[*system(w.say(SYSTEMS)), user(text)],
        tools=[bound.definition for bound in bounds],
        gold=gold,
        run_tool=run_tool,
        check=_checker(wanted, told),
    )


def _checker(wanted: list[Call], told: list[str]) -> Callable[[str, Sequence[Call]], bool]:
    def check(text: str, calls: Sequence[Call]) -> bool:
        return list(calls) == wanted and all(result in text for result in told) and bool(text.strip())

    return check


def _no_tool(w: Words) -> Example:
    """A request to a tool that is not there, or small talk beside tools."""
    bounds = toolbox(w, w.between(2, 5))
    if w.chance(0.4):
        question, answer, check = small_talk(w)
    else:
        *bounds, missing = bounds
        question, answer = joined(w, [request(w, missing)]), NO_TOOL
        check = lambda text: text.strip() == NO_TOOL  # noqa: E731
    return Example(
        kind="tools",
        tag="none",
        messages=[*system(w.say(SYSTEMS)), user(question)],
        tools=[bound.definition for bound in bounds],
        gold=[says(answer)],
        check=lambda text, calls: not calls and check(text),
    )
