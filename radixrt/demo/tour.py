"""`python -m radixrt.demo`: runs an agent on two CPU workers, and prints the hit-rate report."""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx

from radixrt.client import Client
from radixrt.config import FrontendConfig, RouterConfig, StackConfig, WorkerConfig, resolve
from radixrt.demo import world
from radixrt.demo.program import MAX_CALLS, act, calculator, carry_out, fill_in, judge, recall, shown
from radixrt.launch.launcher import Stack
from radixrt.process.ports import free_tcp_address
from radixrt.process.starting import StartError
from radixrt.report import to_text

ASKED = 5
GUESSES = 4
WEATHER = {
    "name": "weather",
    "description": world.weather.__doc__,
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


def say(text: str = "") -> None:
    print(text, flush=True)


def on_one_line(text: str) -> str:
    return " ".join(text.split())


def configure() -> StackConfig:
    """A router with its front end and two CPU workers, on free ports."""
    router = RouterConfig("nano", client_address=free_tcp_address())
    worker = WorkerConfig("nano", device="cpu", max_total_tokens=16_384, max_model_len=4096)
    frontend = FrontendConfig("nano", port=int(free_tcp_address().rpartition(":")[2]))
    return StackConfig(resolve(router), worker, resolve(frontend), workers=2, ready_timeout=120.0)


# ---------------------------------------------------------------- programs over ZMQ


class Marks:
    """Prints answers, and counts those that are right."""

    def __init__(self) -> None:
        self.right = self.asked = 0

    def show(self, question: str, answer: str, right: bool) -> None:
        self.right += right
        self.asked += 1
        say(f"  {'right' if right else 'wrong'}  {question}\n         {on_one_line(answer)}")


def run_programs(client: Client, marks: Marks) -> None:
    notes, questions = world.make_notes(seed=7)
    say(f"\n3. Programs over ZMQ. {ASKED} questions about {world.FACTS} facts, a branch for each")
    asked = questions[:ASKED]
    for question, answer in zip(asked, recall.run(client, notes, [q.text for q in asked]), strict=True):
        marks.show(question.text, answer, question.truth in answer)

    say(f"\n   {GUESSES} hasty guesses at one question, and which of them is right (select)")
    question = questions[ASKED]
    guesses, best = judge.run(client, notes, question.text, GUESSES)
    for guess in guesses:
        say(f"         guess: {on_one_line(guess)[:90]}")
    marks.show(question.text, best, question.truth in best)

    for title, tools, tasks in (
        ("Sums by a calculator, one operation a call", [calculator], world.SUMS),
        ("Two hops through a table", [world.lookup], world.HOPS),
    ):
        say(f"\n   {title}")
        answers = act.run(client, tools, [task.text for task in tasks])
        for task, (answer, calls) in zip(tasks, answers, strict=True):
            marks.show(task.text, answer, bool(calls) and task.truth in answer)
            for call in calls:
                say(f"           {call}")

    say("\n   Forms out of mails, by the JSON schema of a dataclass")
    if find_spec("xgrammar") is None:
        say("         left out: pip install 'radixrt[grammar]'")
        return
    mails = [mail for mail, _ in world.MAILS]
    for (mail, truth), order in zip(world.MAILS, fill_in.run(client, mails), strict=True):
        marks.show(mail, str(order), order == truth)


# ---------------------------------------------------------------- a chat over HTTP


def run_chat(url: str, marks: Marks) -> None:
    """A chat with a tool, streamed; each request resends all earlier turns."""
    messages: list[dict[str, Any]] = []
    for question in world.CHAT:
        say(f"  > {question.text}")
        messages.append({"role": "user", "content": question.text})
        for _ in range(MAX_CALLS):
            messages.append(stream_turn(url, messages))
            calls = messages[-1].get("tool_calls", [])
            for call in calls:
                function = call["function"]
                result = carry_out({"weather": world.weather}, function["name"], function["arguments"])
                say(f"    {shown(**function, result=result)}")
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
            if not calls:
                break
        answer = messages[-1]["content"] or ""
        marks.show(question.text, answer, question.truth in answer)


def stream_turn(url: str, messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Generate the assistant's next message, and print its text as it arrives."""
    text = ""
    calls: list[dict[str, Any]] = []
    for delta in stream_deltas(url, messages):
        if piece := delta.get("content"):
            print(piece if text else f"    {piece}", end="", flush=True)
            text += piece
        for part in delta.get("tool_calls") or []:
            if part["index"] == len(calls):
                calls.append({**part, "function": {"name": part["function"]["name"], "arguments": ""}})
            calls[part["index"]]["function"]["arguments"] += part["function"].get("arguments") or ""
    if text:
        say()
    return {"role": "assistant", "content": text} | ({"tool_calls": calls} if calls else {})


def stream_deltas(url: str, messages: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    tools = [{"type": "function", "function": WEATHER}]
    body = {"messages": messages, "tools": tools, "temperature": 0, "max_tokens": 64, "stream": True}
    headers = {"x-radixrt-program": "chat"}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, headers=headers, timeout=60) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                yield json.loads(line[6:])["choices"][0]["delta"]


# ---------------------------------------------------------------- all of it


def timed(work: Callable[[], None]) -> None:
    began = time.perf_counter()
    work()
    say(f"   {time.perf_counter() - began:.1f} s")


def command() -> str:
    """How `radixrt` is typed here."""
    beside = Path(sys.executable).parent / "radixrt"
    return "radixrt" if shutil.which("radixrt") or not beside.is_file() else os.path.relpath(beside)


def main() -> int:
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    say("1. The model: nano, 12 million parameters, in radixrt/assets/nano (its README says what it can do)")
    say("2. A router with its HTTP front end, two CPU workers")
    config, marks = configure(), Marks()
    try:
        with Stack(config) as stack:
            timed(stack.start)
            url = f"http://{config.frontend.host}:{config.frontend.port}"
            with Client(config.router.client_address) as client:
                timed(lambda: run_programs(client, marks))
                say(f"\n4. A chat with a tool, streamed over HTTP: {url}")
                timed(lambda: run_chat(url, marks))
                say(f"\n   {marks.right} of {marks.asked} answers are right")
                say("\n5. What was reused:  radixrt report\n")
                say(to_text(client.report()))
        say(f"\n6. Next, on your own:  {command()} serve nano\n   A larger model:     {command()} pull")
    except StartError as error:
        say(f"   {error}")
        return 1
    return 0
