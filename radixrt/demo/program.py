"""The demonstration's agent: it answers questions about notes, calls tools, selects among its own guesses and fills in
a form.

Each `@program` below forks one branch per question; the prefix that the branches share (the notes, the list of tools)
is computed once.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from radixrt.lang import Branch, ProgramError, assistant, gen, program, select, system, user
from radixrt.messages import Sampling

GREEDY = Sampling(max_tokens=96, temperature=0)
HASTY = Sampling(max_tokens=48, temperature=2.5)
"""A temperature so high that most guesses are wrong."""
MAX_CALLS = 6

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
    """Answer questions about the same notes, each in its own branch."""
    s += system(f"Here are the notes.\n{notes}")
    branches = s.fork(len(questions))
    for branch, question in zip(branches, questions, strict=True):
        branch += user(question)
        branch += assistant(gen("answer", GREEDY))
    return [await branch["answer"] for branch in branches]


@program
async def act(s: Branch, tools: Sequence[Tool], tasks: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Solve tasks with tools, each in its own branch. Returns (answer, calls) for each."""
    s += system("You are an agent with tools.")
    branches = s.fork(len(tasks))
    for branch, task in zip(branches, tasks, strict=True):
        branch += user(task)
    return await asyncio.gather(*(call_tools(branch, tools) for branch in branches))


async def call_tools(branch: Branch, tools: Sequence[Tool]) -> tuple[str, list[str]]:
    """Let the model call tools until it answers without a call. Returns (answer, calls)."""
    try:
        answer = (await branch.run_tools("turn", tools, GREEDY, max_rounds=MAX_CALLS)).content
    except ProgramError as problem:  # it does not stop calling
        answer = str(problem)
    messages = await branch.messages()
    results = {message["tool_call_id"]: message["content"] for message in messages if message["role"] == "tool"}
    calls = [call for message in messages for call in message.get("tool_calls", ()) if call["id"] in results]
    return answer, [shown(**call["function"], result=results[call["id"]]) for call in calls]


@program
async def judge(s: Branch, notes: str, question: str, thoughts: int) -> tuple[list[str], str]:
    """Generate guesses at a high temperature. Returns (guesses, the guess that is most likely by log-probability)."""
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
    """Extract an Order from each mail, constrained by its JSON schema; None if max_tokens was reached."""
    s += system("You read a mail and fill in a form. Reply in JSON with the fields name, city, item and count.")
    branches = s.fork(len(mails))
    for branch, mail in zip(branches, mails, strict=True):
        branch += user(mail)
        branch += assistant(gen("order", GREEDY, schema=Order))
    values = [await branch.value("order") for branch in branches]
    return [value.parse() if value.finish == "stop" else None for value in values]


# ---------------------------------------------------------------- tools


def shown(name: str, arguments: str, result: str) -> str:
    """A call and its result on one line."""
    return f"{name} {arguments} -> {result}"


def carry_out(functions: dict[str, Tool], name: str, arguments: str) -> str:
    """Call a tool. Returns its result as text, or "error: ..." for an invalid call. `arguments`: JSON from the
    model."""
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
