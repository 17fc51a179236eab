"""Following the system prompt's list of tools: which one, with which arguments, or none."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from training.nano.tasks.chat import small_talk
from training.nano.tasks.example import Call, Example, Message, calls, replies, says, system, user
from training.nano.tasks.toolbox import Bound, may_do, request, result_of, toolbox
from training.nano.tasks.words import COLORS, DAYS, GIVEN, THINGS, Phrases, Words

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
WHICH_FOR = Phrases(
    [
        "<which|what> tool <is for this|does this|would you use for this|do I need for this|fits>: {r}",
        "<name|say|just name> the tool <for|that is for>: {r}",
        "do not call it, <only|just> name the tool: {r}",
    ],
    [],
    varied=False,
)
WHAT_FOR = Phrases(
    ["what <does|can> {n} do?", "what is {n} for?", "@tell the description of {n}@end", "<describe|explain> {n}@end"],
    [],
    varied=False,
)
WHICH_IS = Phrases(
    ["<which|what> tool <has|is described by> this<| description>: {d}", "<find|name> the tool: {d}"],
    [],
    varied=False,
)
"""Questions about the tools, of training: the way from what a tool is for to its name and back."""
DONE = "Done."


def joined(w: Words, asked: list[tuple[str, Call]]) -> str:
    """Requests one after the other, and in training something beside them."""
    if w.training and len(asked) > 1 and w.chance(0.1):
        marks = w.pick((("1. ", "2. ", "3. "), ("- ",) * 3, ("First: ", "Second: ", "Third: "), ("* ",) * 3, ("",) * 3))
        return "\n".join(mark + told for mark, (told, _) in zip(marks, asked, strict=False))
    text = asked[0][0]
    for other, (_, values) in asked[1:]:
        joint = w.pick(MORE_JOINTS if w.training else SECOND)
        if joint[0] in ",;" or joint.startswith(" and"):
            text = text.rstrip(".!?")
        is_value = any(str(value).startswith(re.split(r"\W", other, maxsplit=1)[0]) for value in values.values())
        small = joint.strip() and not is_value and not other.startswith("I ") and not other[:2].isupper()
        text += joint + (other[:1].lower() + other[1:] if small else other)
    if w.training and w.chance(0.12):
        aside = w.say(ASIDES, p=w.pick(GIVEN), d=w.pick(DAYS), c=w.pick(COLORS), t=w.pick(THINGS))
        text = f"{aside} {text}" if w.chance(0.7) else f"{text} {aside}"
    return text


class Exchange(NamedTuple):
    """One request of the user and what comes of it. results: the reply to each call, by the tool's name. told: of
    them, what the answer must repeat."""

    text: str
    answer: str
    wanted: list[Call]
    results: dict[str, str]
    told: list[str]
    check: Callable[[str], bool] = bool

    def gold(self, first: int) -> list[Message]:
        """The assistant's turns and the tools'; ids of calls count from `first`."""
        if not self.wanted:
            return [says(self.answer)]
        replied = [replies(self.results[name], first + i) for i, (name, _) in enumerate(self.wanted)]
        return [calls(*self.wanted, first=first), *replied, says(self.answer)]

    def passes(self, text: str, made: Sequence[Call]) -> bool:
        return list(made) == self.wanted and all(told in text for told in self.told) and self.check(text.strip())

    def run_tool(self, name: str, arguments: dict[str, Any]) -> str:
        return self.results[name] if (name, arguments) in self.wanted else "error: no such call"


def make(w: Words, tag: str, turns: int = 1) -> Example:
    """tag: how many tools there are, one of which fits; "two" for two calls in one turn (in training also three),
    "none" if no tool fits. In training, further requests to the same tools, and questions about them."""
    if tag == "none":
        bounds, first = _without(w, toolbox(w, w.between(2, 5)))
    else:
        bounds = toolbox(w, {"1": 1, "3": w.between(2, 4), "6": w.between(5, 7), "two": w.between(2, 5)}[tag])
        first = _asked(w, bounds, _together(w, len(bounds)) if tag == "two" else 1)
    gold, made = first.gold(0), len(first.wanted)
    for _ in range(turns - 1):
        later = _later(w, bounds)
        gold += [user(later.text), *later.gold(made)]
        made += len(later.wanted)
    return Example(
        kind="tools",
        tag=tag,
        messages=[*system(w.say(SYSTEMS)), user(first.text)],
        tools=[bound.definition for bound in bounds],
        gold=gold,
        run_tool=first.run_tool,
        check=first.passes,
    )


def _together(w: Words, tools: int) -> int:
    return 3 if w.training and tools > 2 and w.chance(0.2) else 2


def _asked(w: Words, bounds: list[Bound], count: int) -> Exchange:
    """Requests to so many of the tools."""
    asked = [request(w, bound) for bound in w.some(bounds, count)]
    text = joined(w, asked)
    wanted = [call for _, call in asked]
    by_name = {bound.name: bound for bound in bounds}
    results = {name: result_of(w, by_name[name]) for name, _ in wanted}
    told = [results[name] for name, _ in wanted if results[name] != "ok"]
    return Exchange(text, " ".join(f"The result is {result}." for result in told) or DONE, wanted, results, told)


def _without(w: Words, bounds: list[Bound]) -> tuple[list[Bound], Exchange]:
    """A request to one of the tools, which is then not there, or small talk beside all of them; and the tools."""
    if w.chance(0.4):
        return bounds, _small(w)
    *others, missing = bounds
    if w.training and may_do(others, missing):
        return _without(w, toolbox(w, len(bounds)))
    return others, _refused(w, missing)


def _refused(w: Words, missing: Bound) -> Exchange:
    return Exchange(joined(w, [request(w, missing)]), NO_TOOL, [], {}, [], NO_TOOL.__eq__)


def _small(w: Words) -> Exchange:
    text, answer, check = small_talk(w)
    return Exchange(text, answer, [], {}, [], check)


def _later(w: Words, bounds: list[Bound]) -> Exchange:
    """Of training: what may come after the first request."""
    r = w.random()
    if r < 0.55:
        return _asked(w, bounds, min(len(bounds), w.pick((1, 1, 1, 2))))
    if r < 0.65:
        missing = toolbox(w, 1)[0]
        if not may_do(bounds, missing):
            return _refused(w, missing)
    if r < 0.7:
        return _small(w)
    bound = w.pick(bounds)
    if w.chance(0.6):
        text = w.say(WHICH_FOR, r=request(w, bound)[0])
        return Exchange(text, bound.name, [], {}, [])
    if w.chance(0.5):
        return Exchange(w.say(WHAT_FOR, n=bound.name), bound.description, [], {}, [])
    return Exchange(w.say(WHICH_IS, d=bound.description), bound.name, [], {}, [])
