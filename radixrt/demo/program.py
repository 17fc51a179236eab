"""The demonstration's agent: it reads notes, calls tools, judges its own thoughts and fills in a form.

Each function below that is a `@program` forks a branch for each question. What the branches share, notes or the list of
tools, is computed once; `radixrt run` runs such a file against any model.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from radixrt.lang import Branch, assistant, gen, program, select, system, user
from radixrt.messages import Sampling

GREEDY = Sampling(max_tokens=96, temperature=0)
HASTY = Sampling(max_tokens=48, temperature=2.5)
"""So hot that most guesses are wrong."""
MOST_CALLS = 6
CALL = re.compile(r'<tool_call>\s*\{"name": "(\w+)", "arguments": (\{.*\})\}\s*</tool_call>')
TYPES = {"str": "string", "int": "integer"}

Tool = Callable[..., Any]


@dataclass
class Order:
    """What a mail asks for."""

    name: str
    city: str
    item: str
    count: int


# ---------------------------------------------------------------- programs


@program
async def recall(s: Branch, notes: str, questions: Sequence[str]) -> list[str]:
    """Each question in a branch of its own, all of them over the same notes."""
    s += system(f"Here are the notes.\n{notes}")
    branches = s.fork(len(questions))
    for branch, question in zip(branches, questions, strict=True):
        branch += user(question)
        branch += assistant(gen("answer", GREEDY))
    return [await branch["answer"] for branch in branches]


@program
async def act(s: Branch, tools: Sequence[Tool], tasks: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Each task in a branch of its own, which calls tools until it knows. (answer, calls) of each."""
    s += system("\n".join(["You are an agent with tools.", "Tools:", *map(describe, tools)]))
    branches = s.fork(len(tasks))
    for branch, task in zip(branches, tasks, strict=True):
        branch += user(task)
    return await asyncio.gather(*(call_tools(branch, tools) for branch in branches))


async def call_tools(branch: Branch, tools: Sequence[Tool]) -> tuple[str, list[str]]:
    """Call, result, call, result, until the model says something."""
    functions = {tool.__name__: tool for tool in tools}
    calls: list[str] = []
    while True:
        branch += assistant(gen("turn", GREEDY))
        said = await branch["turn"]
        if not (call := CALL.search(said)) or len(calls) == MOST_CALLS:
            return said, calls
        result = await branch.tool(carry_out, functions, *call.groups(), append="tool")
        calls.append(f"{call[1]} {call[2]} -> {result}")


@program
async def judge(s: Branch, notes: str, question: str, thoughts: int) -> tuple[list[str], str]:
    """Branches that guess, and the guess that the model, when it looks again, finds the likeliest."""
    s += system(f"Here are the notes.\n{notes}")
    s += user(question)
    branches = s.fork(thoughts)
    for number, branch in enumerate(branches):
        branch += assistant(gen("thought", HASTY, seed=number))
    guesses = [await branch["thought"] for branch in branches]
    s += assistant(select("best", list(dict.fromkeys(guesses))))
    return guesses, await s["best"]


@program
async def fill_in(s: Branch, mails: Sequence[str]) -> list[Order | None]:
    """An object out of each mail, by the JSON schema of its type; None where max_tokens were too few."""
    s += system("You read a mail and fill in a form. Reply in JSON with the fields name, city, item and count.")
    branches = s.fork(len(mails))
    for branch, mail in zip(branches, mails, strict=True):
        branch += user(mail)
        branch += assistant(gen("order", GREEDY, schema=Order))
    values = [await branch.value("order") for branch in branches]
    return [value.parse() if value.finish == "stop" else None for value in values]


# ---------------------------------------------------------------- tools


def describe(tool: Tool) -> str:
    """A tool as the model reads it: `calculator(expression: string): Calculates ...`"""
    parameters = inspect.signature(tool).parameters.values()
    arguments = ", ".join(f"{p.name}: {TYPES[p.annotation]}" for p in parameters)
    return f"{tool.__name__}({arguments}): {inspect.getdoc(tool)}"


def carry_out(functions: dict[str, Tool], name: str, arguments: str) -> str:
    """What the tool says; "error: ..." to a call that does not fit. `arguments` is JSON, as the model wrote it."""
    try:
        return str(functions[name](**json.loads(arguments)))
    except (ValueError, KeyError, TypeError) as problem:
        return f"error: {problem}"


def calculator(expression: str) -> int:
    """Calculates two numbers with +, - or *."""
    match = re.fullmatch(r"\s*(-?\d+)\s*([-+*])\s*(-?\d+)\s*", expression)
    if match is None:
        raise ValueError("give one operation, such as 2 + 3")
    a, b = int(match[1]), int(match[3])
    return {"+": a + b, "-": a - b, "*": a * b}[match[2]]
