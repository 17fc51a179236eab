"""Arithmetic by a calculator: one operation a call, the result of one goes into the next."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from training.nano.tasks.example import Call, Example, Message, calls, numbers, replies, says, system, tool, user
from training.nano.tasks.toolbox import toolbox
from training.nano.tasks.words import GIVEN, THINGS, Phrases, Words, split_of

LIMIT = 100_000


class Step(NamedTuple):
    operator: str
    number: int


OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
}
EXPRESSION = re.compile(r"\s*(-?\d+)\s*([-+*])\s*(-?\d+)\s*")

ASK = Phrases(
    [
        "What is {e}?",
        "Calculate {e}.",
        "How much is {e}?",
        "Compute {e}.",
        "Work out {e}.",
        "{e}",
        "<what is|what's|how much is|what would be|what was> {e}?",
        "@do<calculate|compute|work out|evaluate|find|solve|determine|do the sum|get me|give me> {e}@end",
        "@tell the <value|result|answer> of {e}@end",
        "@know <how much|what> {e} <makes|gives|equals|comes to|would be>@end",
        "@know what <the result of|the value of|you get for|comes out of> {e}< is|>@end",
        "what does {e} <give|make|equal|come to>?",
        "{e} <= ?|=|is what?|makes what?|is how much?>",
        "<how much|what> <do you get for|comes out of|do I get from|results from> {e}?",
        "the <sum|task|problem|question> is {e}@end",
    ],
    ["Tell me what {e} is.", "Please compute {e}.", "Say how much {e} is."],
)
CHAIN_STARTS = Phrases(
    [
        "Take {a}",
        "Start with {a}",
        "Begin with {a}",
        "<take|use|start with|begin with|start at|begin at|I have|we have|there is|here is|think of|let us take|"
        "I take> "
        "<|the number |a number, |the value >{a}",
        "<from|with|first> {a}",
    ],
    ["Start from {a}", "Take the number {a}"],
)
CHAIN_STEPS = {
    "+": Phrases(
        [
            "add {n}",
            "then add {n}",
            "plus {n}",
            "<|then |and then |next |after that |also |I |we >add <|the number |another >{n}<| to it| to that| more>",
            "<|then |and then |next |we ><put {n} on top|raise it by {n}|increase it by {n}|let {n} come to it>",
            "<and|then|now> plus {n}",
        ],
        ["and add {n}", "now add {n}"],
        varied=False,
    ),
    "-": Phrases(
        [
            "subtract {n}",
            "take away {n}",
            "then subtract {n}",
            "minus {n}",
            "<|then |and then |next |after that |also |I |we ><subtract|take away|take off|remove|deduct> "
            "<|the number >{n}<| from it| from that>",
            "<|then |and then |we ><lower|reduce|decrease> it by {n}",
            "<and|then|now> minus {n}",
        ],
        ["and subtract {n}", "now take away {n}"],
        varied=False,
    ),
    "*": Phrases(
        [
            "multiply by {n}",
            "then multiply by {n}",
            "times {n}",
            "<|then |and then |next |after that |also |I |we >multiply <it |that |the result |>by <|the number >{n}",
            "<|then |and then |next |we >take <it|that|this> {n} times",
            "<and|then|now> times {n}",
        ],
        ["and multiply by {n}", "now multiply by {n}"],
        varied=False,
    ),
}
CHAIN_ENDS = Phrases(
    [
        "What do you get?",
        "What is the result?",
        "Tell me the result.",
        "",
        "@tell the <result|answer|last number|number>@end",
        "@know what <I|we> <get|have>@end",
        "<what|how much> <do I|do we|will I|will we> <get|have><| then| now| in the end>?",
        "<what|which number|how much> <comes out|is left|do you have>?",
        "<what|how much> is <that|the answer|this>?",
    ],
    ["What is it then?", "Tell me what you get."],
)
STORY_STARTS = Phrases(
    [
        "{p} has {a} {t}.",
        "{p} starts with {a} {t}.",
        "There are {a} {t} in the box of {p}.",
        "{p} owns {a} {t}.",
        "<|at first |today |first |once >{p} <has|had|owns|keeps|holds|starts with|begins with|finds|bought> <|"
        "about him |>{a} {t}@end",
        "<there are|there were|I see|we count> {a} {t} <in|on|at> the <box|bag|table|house|room|desk|shop> of {p}@end",
        "{p} <has|keeps> {a} {t} <at home|in a bag|on a table|in a room|there>@end",
        "{a} {t} <belong to|are with|are owned by> {p}@end",
    ],
    ["{p} has a box with {a} {t}.", "There are {a} {t} that {p} owns."],
)
STORY_STEPS = {
    "+": Phrases(
        [
            "{p} buys {n} more.",
            "Then {p} finds {n} {t}.",
            "{q} gives {p} {n} more.",
            "{p} gets {n} {t} from {q}.",
            "<|then |now |next |later |after that >{p} <buys|gets|takes|receives|makes|wins|picks up|collects|"
            "adds|finds> "
            "<{n} more|{n} {t}|another {n}|{n} new {t}|{n} more {t}>@end",
            "<|then |now |next |later >{q} <brings|hands|sends|sells|lends|passes> {p} <{n} more|{n} {t}|"
            "another {n}|{n} of hers>@end",
            "<|then |now |later ><{n} more come|{n} more are found|{n} are added|{n} {t} are brought>@end",
        ],
        ["Then {q} gives {p} {n} {t}.", "{p} finds {n} more."],
    ),
    "-": Phrases(
        [
            "{p} loses {n} {t}.",
            "Then {p} gives {n} to {q}.",
            "{p} sells {n} {t}.",
            "{q} takes {n} of them.",
            "<|then |now |next |later |after that >{p} <loses|sells|breaks|eats|drops|throws away|gives away|"
            "spends|leaves> "
            "<{n}|{n} {t}|{n} of them|{n} of the {t}>@end",
            "<|then |now |next |later >{p} <gives|hands|brings|sends|lends|shows> <{n}|{n} {t}|{n} of them> to {q}@end",
            "<|then |now |next |later >{q} <takes|gets|buys|steals|borrows> <{n}|{n} {t}|{n} of them> from {p}@end",
            "<|then |now |later ><{n} are lost|{n} of them break|{n} {t} are gone|{n} are sold>@end",
        ],
        ["Then {p} loses {n} of them.", "{p} sells {n} to {q}."],
    ),
    "*": Phrases(
        [
            "Then the {t} of {p} become {n} times as many.",
            "Now {p} has {n} times as many.",
            "<then|now|next|later|today|after that|by magic>, <{p} has|{p} owns|{p} gets|there are> {n} times "
            "<as many|the number|that number>@end",
            "<|then |now |later >the <number|count> of {t} <grows|becomes|is multiplied|is made> <by|to> {n} times@end",
            "<|then |now |later ><they|the {t}> become {n} times <as many|more>@end",
        ],
        ["Then {p} has {n} times as many {t}."],
    ),
}
STORY_ENDS = Phrases(
    [
        "How many {t} does {p} have?",
        "How many {t} does {p} have now?",
        "How many {t} are there?",
        "<|so |and |then >how many <|{t} ><does {p} have|has {p}|does {p} own|are left|are with {p}|has {p} "
        "got> <|then|at last|today|after that>?",
        "@know how many {t} {p} <has|owns|keeps><| now| then| in the end| at last>@end",
        "@know how many {t} there are@end",
        "@tell the number of {t} <of {p}|that {p} has|that are left>@end",
    ],
    ["How many {t} does {p} have in the end?", "How many {t} are there now?"],
)
SYSTEMS = Phrases(
    [
        "",
        "You are a helpful assistant.",
        "Use the calculator, one operation a call.",
        "You are an agent with tools. One operation a call.",
        "You cannot do sums in your head. Use the tool.",
        "<use|work with|take|calculate with|answer with> the <calculator|tool|tools> <for each step|for every "
        "sum|step by step|always>@end",
        "<you are|act as|be> <a helpful|an|a careful|a small> <worker|assistant|helper><|. Use the tools|. One "
        "step at a time>@end",
        "<one|only one|a single> <step|operation|sum> <in|for|with> <each|every|one> call@end",
    ],
    ["You are an agent. Use the calculator for one operation at a time.", "Use the tool, one operation a call."],
)
NAMES = ("calculator", "calculate", "calc", "compute", "math")
DESCRIPTIONS = ("Calculates two numbers with +, - or *.", "A calculator for one operation.", "Evaluates an expression.")
MORE_DESCRIPTIONS = Phrases(
    [
        "<calculates|computes|evaluates|works out|solves> <an expression|a sum|one operation|a formula|a + b, a "
        "- b or a * b>@end",
        "<for|does|use it for> <sums|arithmetic|calculations|one operation of two numbers>@end",
    ],
    [],
)
ARGUMENTS = ("expression", "expr", "input", "formula")


def run_expression(text: str) -> str:
    """What a calculator says to `a op b`."""
    match = EXPRESSION.fullmatch(text)
    if match is None:
        return "error: give one operation, such as 2 + 3"
    return str(OPERATIONS[match[2]](int(match[1]), int(match[3])))


def problem(w: Words, count: int) -> tuple[int, list[Step]]:
    """A first number and `count` steps; no result is negative or large. The first two numbers are of this split."""
    while True:
        value = start = w.between(2, 99) if w.chance(0.7) else w.between(100, 999)
        steps: list[Step] = []
        for _ in range(count):
            operator = w.pick("++--*")
            number = (
                w.between(2, 12) if operator == "*" else w.between(2, 99) if w.chance(0.75) else w.between(100, 999)
            )
            result = OPERATIONS[operator](value, number)
            if not 0 < result < LIMIT:
                break
            value = result
            steps.append(Step(operator, number))
        if len(steps) == count and split_of(f"{start} {steps[0].operator} {steps[0].number}") == w.split:
            return start, steps


def tell(w: Words, start: int, steps: list[Step]) -> tuple[str, str]:
    """The problem in words or signs, and how its answer reads, with {r} for the result."""
    form = w.pick(("expression", "chain", "story"))
    if form == "expression":
        text = str(start)
        for i, step in enumerate(steps):
            if i and steps[i - 1].operator != "*" and step.operator == "*" or i and w.chance(0.3):
                text = f"({text})"
            text = f"{text} {step.operator} {step.number}"
        return w.say(ASK, e=text), "The result is {r}."
    if form == "chain":
        parts = [w.say(CHAIN_STEPS[operator], n=number) for operator, number in steps]
        joint = w.pick((", ", ", ", ". ", "; ", "\n")) if w.training else ", "
        if joint == ". ":
            parts = [part.capitalize() for part in parts]
        told = joint.join([w.say(CHAIN_STARTS, a=start), *parts])
        return f"{told}. {w.say(CHAIN_ENDS)}".strip(), "The result is {r}."
    names = w.some(GIVEN, 2) if w.chance(0.6) else [w.name(), w.pick(GIVEN)]
    thing = w.pick(THINGS)
    values = {"p": names[0], "q": names[1], "t": thing}
    sentences = [w.say(STORY_STARTS, a=start, **values)]
    sentences += [w.say(STORY_STEPS[operator], n=number, **values) for operator, number in steps]
    return " ".join([*sentences, w.say(STORY_ENDS, **values)]), f"{names[0]} has {{r}} {thing}."


def make(w: Words, tag: str) -> Example:
    """tag: how many steps."""
    start, steps = problem(w, int(tag))
    question, answer = tell(w, start, steps)
    name = w.pick(NAMES) if w.chance(0.8) else w.word()
    style = "expression" if w.chance(0.7) else "numbers"
    about = w.say(MORE_DESCRIPTIONS) if w.training and w.chance(0.5) else w.pick(DESCRIPTIONS)
    if style == "expression":
        argument = w.pick(ARGUMENTS)
        own = [tool(name, about, {argument: "string"})]
    else:
        names = {
            "+": w.pick(("add", "plus", "sum")),
            "-": w.pick(("subtract", "minus")),
            "*": w.pick(("multiply", "times")),
        }
        verbs = {"+": "Adds two numbers.", "-": "Subtracts b from a.", "*": "Multiplies two numbers."}
        if w.training and w.chance(0.4):
            verbs = {"+": "The sum of a and b.", "-": "a less b.", "*": "a times b."}
        own = [tool(names[o], verbs[o], {"a": "integer", "b": "integer"}) for o in names]
        w.rng.shuffle(own)
    others = (
        [bound.definition for bound in toolbox(w, w.between(1, 3), {t["function"]["name"] for t in own})]
        if w.chance(0.35)
        else []
    )
    tools = own + others
    if others:
        w.rng.shuffle(tools)

    def call(a: int, step: Step) -> Call:
        if style == "expression":
            return name, {argument: f"{a} {step.operator} {step.number}"}
        return names[step.operator], {"a": a, "b": step.number}

    def run_tool(called: str, arguments: dict[str, Any]) -> str:
        if style == "expression":
            good = called == name and set(arguments) == {argument}
            return run_expression(str(arguments[argument])) if good else f"error: no such call of {called}"
        operator = next((o for o in names if names[o] == called), None)
        if operator is None or set(arguments) != {"a", "b"}:
            return f"error: no such call of {called}"
        return run_expression(f"{arguments['a']} {operator} {arguments['b']}")

    gold: list[Message] = []
    value = start
    for i, step in enumerate(steps):
        made = call(value, step)
        gold.append(calls(made, first=i))
        gold.append(replies(run_tool(*made), i))
        value = OPERATIONS[step.operator](value, step.number)
    gold.append(says(answer.replace("{r}", str(value))))
    right = value

    def check(text: str, calls: Any) -> bool:
        return bool(calls) and numbers(text)[-1:] == [right]

    return Example("arithmetic", tag, [*system(w.say(SYSTEMS)), user(question)], gold, check, tools, run_tool)
