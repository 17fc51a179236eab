"""What tools of training alone are for: to do a thing to a device, to tell one thing about what is asked about."""

from __future__ import annotations

from bench.nano.tasks.domains import DEVICE, DOMAINS, Domain, only


def _verb_domain(verb: str) -> Domain:
    """A tool that does one thing to a device."""
    does = verb + ("es" if verb.endswith(("s", "sh", "ch", "x")) else "s")
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
        more=only(f"<{does}|use it to {verb}|can {verb}|this {does}> <a device|a thing|something|things>@end"),
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
        more=only(f"<tells|gives|shows|finds|reports|looks up> the {aspect} of <a thing|something|anything>@end"),
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
