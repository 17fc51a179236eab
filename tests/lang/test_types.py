"""What a type checker knows of a user's program. It runs once, over all of `USER`."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest
from mypy import api

import radixrt

BEHIND = "radixrt.client.local,radixrt.wire.*,httpx.*,numpy.*,zmq.*,pydantic.*,radixrt.report.*"
"""Modules that no type of a user's program is in; mypy would take a minute to read them all."""
USER = textwrap.dedent("""
    from typing import reveal_type

    from radixrt import AsyncClient, Branch, ChatPrompt, Client, SyncBranch, Tool, assistant, gen, program, user

    @program
    def ask(s: SyncBranch, question: str, tries: int = 1) -> str:
        s += user(question)
        s += gen("answer", max_tokens=16)
        reveal_type(s["answer"])  # str
        return s["answer"]

    @program
    async def count(s: Branch, text: str) -> int:
        reveal_type(await s["n"])  # str
        reveal_type(ask(s, text))  # Coroutine[Any, Any, str]
        reveal_type(await s.tool(len, text))  # int
        reveal_type((await s.run_tools("n", [fetch], temperature=0)).tool_calls)  # list[ToolCall]
        s += assistant(gen("n", tools=[fetch, {"type": "function"}, Tool(fetch, timeout=1)]))
        s += gen("n", tools=["fetch"])  # error: list-item
        reveal_type(await s.tool(fetch, text, timeout=5, append="tool"))  # float
        s.tool(len, text, timeout="5")  # error: call-overload
        return int(await ask(s, text, tries=2))

    async def fetch(url: str) -> float:
        return 0.5

    gen("x", max_new_tokens=16)  # error: call-arg
    gen("x", temperature="hot")  # error: arg-type

    @program
    def twice(s: SyncBranch) -> tuple[str, int]:
        reveal_type(s.tool(Tool(fetch, timeout=2), "x"))  # float
        return ask(s, "x"), count(s, "x")

    client = Client("local:nano")
    reveal_type(ask)  # Program[[question: str, tries: int =], str]
    reveal_type(ask.run("x"))  # str
    reveal_type(ask.run(client, "x", tries=2))  # str
    reveal_type(ask.run("x", client=client))  # str
    reveal_type(count.run(client, text="x"))  # int
    reveal_type(twice.run())  # tuple[str, int]
    reveal_type(ask.run_batch([{"question": "x"}], client))  # list[str]
    reveal_type(ask.run_batch([], return_exceptions=True))  # list[str | BaseException]
    reveal_type(client.generate("x").text)  # str
    reveal_type(client.generate(ChatPrompt([], [{"type": "function"}])).tool_calls[0].arguments)  # str

    async def main(aio: AsyncClient) -> None:
        reveal_type(await ask(aio, "x"))  # str
        reveal_type(await count.batch(aio, [{"text": "x"}]))  # list[int]

    client.generate("x", max_tokens=16)  # error: call-arg
    ask.run(1, 2, nonsense=3)  # error: call-overload
    ask.run()  # error: call-overload
    count.run(client, 1)  # error: call-overload
    ask(client, "x")  # error: call-overload
    ask.run("x").unknown  # error: attr-defined
    program(lambda: 1)  # error: arg-type
    from radixrt import unknown  # error: attr-defined
""")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """What mypy says of each line, in strict mode: the type that it reveals, or `error: CODE`."""
    folder = tmp_path_factory.mktemp("types")
    (folder / "user.py").write_text(USER)
    root = Path(radixrt.__file__).parent.parent
    (folder / "mypy.ini").write_text(
        f"[mypy]\nstrict = True\nmypy_path = {root}\nfollow_imports = silent\n[mypy-{BEHIND}]\nfollow_imports = skip\n"
    )
    options = ["--config-file", str(folder / "mypy.ini"), "--cache-dir", str(folder / "cache"), "--hide-error-context"]
    out, problems, _ = api.run([*options, str(folder / "user.py")])
    assert not problems
    said: dict[int, str] = {}
    for number, kind, text in re.findall(r"user\.py:(\d+): (note|error): (.*)", out):
        if kind == "error":
            said[int(number)] = "error: " + re.sub(r".*\[(.*)\]$", r"\1", text)
        elif revealed := re.match(r'Revealed type is "(.*)"', text):
            said[int(number)] = re.sub(r"\b(\w+\.)+", "", revealed[1])
    return said


def _expected() -> dict[int, str]:
    lines = enumerate(USER.splitlines(), 1)
    return {number: line.partition("  # ")[2] for number, line in lines if "  # " in line}


def test_programs_keep_their_signatures_for_type_checkers(found: dict[int, str]):
    assert found == _expected()
