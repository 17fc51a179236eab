"""What tools of training alone are for: to do a thing to a device, to tell one thing about what is asked about; and
tools that are close: the same verb and another object, the same object and another verb."""

from __future__ import annotations

from functools import cache
from itertools import combinations

from training.nano.tasks.domains import DEVICE, DOMAINS, Domain, only, told
from training.nano.tasks.words import NOUNS, OBJECTS, Words


def _third(verb: str) -> str:
    """The form for he, she and it."""
    if verb.endswith("y") and verb[-2] not in "aeiou":
        return f"{verb[:-1]}ies"
    return verb + ("es" if verb.endswith(("s", "sh", "ch", "x")) else "s")


def _a(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def _verb_domain(verb: str) -> Domain:
    """A tool that does one thing to a device."""
    does = _third(verb)
    return Domain(
        (verb, f"{verb}_it", f"{verb}_device", f"{verb}_thing"),
        (f"{does.capitalize()} a thing.", f"{verb.capitalize()} a device."),
        (DEVICE,),
        only(
            f"@do{verb} the {{0}}@end",
            f"@do{verb} <this|that|our|my> {{0}}@end",
            f"I <want|need|have|would like> to {verb} the {{0}}@end",
            f"<do not forget to|remember to|the plan is to> {verb} the {{0}}@end",
            f"the {{0}}<: |, >{verb} it<|, please>@end",
        ),
        more=told(f"<{does}|use it to {verb}|can {verb}|this {does}> <a device|a thing|something|things>@end"),
    )


def _aspect_domain(aspect: str) -> Domain:
    """A tool that tells one thing about what it is asked about."""
    return Domain(
        (aspect, f"get_{aspect}", f"{aspect}_of", f"find_{aspect}"),
        (f"Tells the {aspect} of a thing.", f"{aspect.capitalize()} of something."),
        ((("name", "thing", "of", "item", "target"), "string", "name"),),
        only(
            f"@tell the {aspect} of {{0}}@end",
            f"@tell {{0}}'s {aspect}@end",
            f"which {aspect} <does|did> {{0}} have?",
            f"@know <which|what> {aspect} {{0}} has@end",
            f"{{0}}<: |, >what is <the|its> {aspect}?",
        ),
        ("{n}", "{word}", "{code}"),
        more=told(f"<tells|gives|shows|finds|reports|looks up> the {aspect} of <a thing|something|anything>@end"),
    )


VERBS = (
    "open close lock unlock clean move fix check count measure hide lift lower rent sell test reset update "
    "delete copy "
    "share heat cool fill wash charge mute shake inspect replace return pack"
).split()
ASPECTS = (
    "age height address birthday size weight owner menu score temperature speed status balance level history origin "
    "length depth rank capacity"
).split()
MORE_DOMAINS = DOMAINS + tuple(map(_verb_domain, VERBS)) + tuple(map(_aspect_domain, ASPECTS))
"""Of training."""
_BY_NAME = {domain.names[0]: domain for domain in MORE_DOMAINS}
NEAR = tuple(
    tuple(_BY_NAME[name] for name in pair.split())
    for pair in (
        "turn_on turn_off", "weather weather_on", "set_alarm timer", "send_message add_note", "set_color turn_on",
        "open close", "lock unlock", "lift lower", "price order", "add_note calendar", "heat cool",
        "search read_file",
        "turn_off lock", "set_alarm calendar", "phone_number send_message", "age birthday", "turn_on open",
    )
)  # fmt: skip
"""Tools that are easily taken for each other."""
ALIKE = frozenset(
    frozenset(pair.split())
    for pair in (
        "weather weather_on", "weather temperature", "weather_on temperature", "check inspect", "check test",
        "inspect test", "fix reset", "lift move", "age birthday", "phone_number send_message", "reset delete",
        "copy read_file", "open read_file", "height size", "size length", "size weight", "clean wash", "check status",
        "turn_on open", "turn_off close", "fix replace", "depth height", "length depth", "length height",
        "search read_file", "count measure", "calendar add_note", "address origin", "owner origin",
    )
)  # fmt: skip
"""What may do for each other, where one is not there."""


def alike(one: Domain, other: Domain) -> bool:
    """Whether a tool for the one might do what the other is for."""
    if one.thing and other.thing and one.thing != other.thing:
        return False
    acts = {one.act or one.names[0], other.act or other.names[0]}
    return len(acts) == 1 or frozenset(acts) in ALIKE


@cache
def _thing_domain(verb: str, thing: str) -> Domain:
    """A tool that does one thing to one kind of device, which has a name."""
    does, a = _third(verb), _a(thing)
    return Domain(
        (f"{verb}_{thing}", f"{thing}_{verb}", f"do_{verb}_{thing}"),
        (f"{does.capitalize()} {a}.", f"{verb.capitalize()} {a}."),
        ((("name", "which", "target", "id", thing), "string", "name"),),
        only(
            f"@do{verb} the {thing} {{0}}@end",
            f"@do{verb} the {thing} <called|named|with the name> {{0}}@end",
            f"<remember to|the plan is to|I would like to> {verb} <{thing}|the {thing}> {{0}}@end",
            f"the {thing} {{0}}<: |, >{verb} it<|, please>@end",
        ),
        more=told(f"<{does}|use it to {verb}|can {verb}|this {does}> <{a}|the {thing}|a certain {thing}>@end"),
        act=verb,
        thing=thing,
    )


@cache
def _fact_domain(aspect: str, place: str) -> Domain:
    """A tool that tells one thing about one kind of place."""
    a = _a(place)
    return Domain(
        (f"{place}_{aspect}", f"{aspect}_of_{place}", f"get_{place}_{aspect}"),
        (f"Tells the {aspect} of {a}.", f"{aspect.capitalize()} of {a}."),
        ((("name", "which", "of", "target", place), "string", "name"),),
        only(
            f"@tell the {aspect} of the {place} {{0}}@end",
            f"which {aspect} <does|did> the {place} {{0}} have?",
            f"@know <which|what> {aspect} the {place} {{0}} has@end",
            f"the {place} {{0}}<: |, >what is its {aspect}?",
        ),
        ("{n}", "{word}", "{code}"),
        more=told(f"<tells|gives|shows|finds|reports|looks up> the {aspect} of <{a}|the {place}>@end"),
        act=aspect,
        thing=place,
    )


def close_domains(w: Words, count: int) -> list[Domain]:
    """Different ones of few verbs and few objects, or of few facts and few places."""
    make, firsts, seconds = (_thing_domain, VERBS, OBJECTS) if w.chance(0.6) else (_fact_domain, ASPECTS, NOUNS)
    side = 2 if count <= 4 else 3
    while True:
        chosen = w.some(firsts, side)
        if ALIKE.isdisjoint(map(frozenset, combinations(chosen, 2))):
            break
    pairs = [(a, b) for a in chosen for b in w.some(seconds, side)]
    return [make(a, b) for a, b in w.some(pairs, count)]
