"""The tools of an example: known ones, invented ones, close ones; and what a user says to have one called."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

from training.nano.tasks.domains import DOMAINS, Domain
from training.nano.tasks.example import Call, tool
from training.nano.tasks.more_domains import MORE_DOMAINS, NEAR, alike, close_domains
from training.nano.tasks.words import COLORS, DAYS, GIVEN, LANGUAGES, OBJECTS, THINGS, Phrases, Words, fill

NAMING = Phrases(
    ["<use|call|take|with|by> {n}: ", "<use|call|take|run> <the tool |>{n}. ", "<use|call> {n} for this: ", "{n}: "], []
)
"""Before a request, naming the tool."""


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


def _meaningless(w: Words) -> str:
    """A name that does not say what the tool is for; in training of more forms."""
    if w.training and w.chance(0.35):
        forms = (
            lambda: f"{w.word()}_{w.word()}",
            lambda: f"{w.pick(('do', 'my', 'call', 'the', 'run', 'use'))}_{w.word()}",
            lambda: f"{w.word()}{w.name()}",
            lambda: f"{w.word()}_{w.code(2)}",
            lambda: f"{w.pick(('tool', 'f', 'action', 'fn', 't'))}_{w.code(w.between(1, 3))}",
        )
        return w.pick(forms)()
    return w.word() if w.chance(0.5) else f"{w.word()}_{w.pick(('tool', 'it', 'call', 'get', 'run'))}"


MEANINGLESS = {"train": 0.75, "eval": 0.35}
"""The share of known tools whose name says nothing. Which tool fits must then be read from the descriptions; where the
name says it too, training learns to look at the name alone."""


def bind(w: Words, domain: Domain) -> Bound:
    """A known tool, often with an invented name."""
    name = w.pick(domain.names)
    if w.chance(MEANINGLESS[w.split]):
        name = _meaningless(w)
    arguments: dict[str, str] = {}
    for names, kind, _ in domain.arguments:
        own = w.word() if w.training and w.chance(0.08) else ""
        arguments[own or w.pick([n for n in names if n not in arguments])] = kind
    described = w.pick(domain.descriptions)
    if domain.more and w.training and w.chance(0.6):
        described = w.say(domain.more)
        described = described[:1].upper() + described[1:] if w.chance(0.8) else described
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
        "<to|can|for those who want to|call it to|a tool to|helps to|use this to|will|use it to> {v} {args}<.|.|>",
        "<Call this to|A tool to|Helps to|Will|Can|It can|This can> {v} {args}.",
        "{v} {args} <with this|by this tool><.|.|>",
        "<|this tool |this |it >{v}s {args}<.|.|>",
    ],
    [],
    varied=False,
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
    name = verb if w.chance(0.3 if w.training else 0.5) else _meaningless(w) if w.training else w.word()
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
        domains = w.some(MORE_DOMAINS if w.training and w.chance(0.35) else DOMAINS, count)
        if w.training and count > 1 and w.chance(0.4):
            domains = _with_close_ones(w, count)
        found = [invent(w) if w.chance(0.25) else bind(w, domain) for domain in domains]
        if w.training and w.chance(0.06):
            found = _of_one_family(w, found)
        if len({bound.name for bound in found}.difference(taken)) == count:
            return found


def _with_close_ones(w: Words, count: int) -> list[Domain]:
    """Of training: some are easily taken for each other."""
    if w.chance(0.5):
        close = list(w.pick(NEAR))
        others = MORE_DOMAINS
    else:
        close = close_domains(w, w.between(2, max(2, count)))
        others = DOMAINS  # not those that do a thing to anything, which would fit as well
    domains = close + [domain for domain in w.some(others, count) if domain not in close]
    domains = domains[:count]
    w.rng.shuffle(domains)
    return domains


def _of_one_family(w: Words, found: list[Bound]) -> list[Bound]:
    """Names that begin alike, so that all of a name must be copied."""
    stem = w.word()
    return [bound._replace(name=f"{stem}_{w.word()}") for bound in found]


def may_do(bounds: Collection[Bound], missing: Bound) -> bool:
    """Whether one of the tools might do for one that is not there."""
    if missing.domain is None:
        return any(bound.verb == missing.verb for bound in bounds)
    return any(bound.domain and alike(bound.domain, missing.domain) for bound in bounds)
