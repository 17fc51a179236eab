"""Programs that call programs on their own branches."""

from __future__ import annotations

import pytest

from radixrt import Branch, ProgramError, Sampling, SyncBranch, assistant, gen, program, race, trace, user
from radixrt.client import Client

SHORT = Sampling(max_tokens=8, temperature=0.0, ignore_eos=True)


@program
async def ask(s: Branch, question: str, site: str = "") -> str:
    s += user(question + site)
    s += assistant(gen("answer", SHORT))
    return await s["answer"]


@program
def ask_plainly(s: SyncBranch, question: str, site: str = "") -> str:
    s += user(question + site)
    s += assistant(gen("answer", SHORT))
    return s["answer"]


@program
async def whole(s: Branch) -> list[str]:
    """What the others say with parts, said in one."""
    for question in ("Who?", "Why?"):
        s += user(question)
        s += assistant(gen("answer", SHORT))
        await s["answer"]
    s += user("Sure?")
    s += assistant(gen("sure", SHORT))
    return [await s["sure"], await s["answer"]]


PARTS = pytest.mark.parametrize("part", [ask, ask_plainly], ids=["async", "plain"])


@PARTS
def test_an_async_program_goes_on_with_another(client: Client, part):
    @program
    async def outer(s: Branch):
        first = await part(s, "Who?")
        second = await part(s, "Wh", site="y?")
        s += user("Sure?")
        s += assistant(gen("sure", SHORT))
        assert first and second == await s["answer"], "its names are the branch's"
        return [await s["sure"], second]

    assert outer.run(client) == whole.run(client)
    assert {row["program"] for row in client.report()["programs"]} == {"outer", "whole"}


@PARTS
def test_a_plain_program_goes_on_with_another(client: Client, part):
    @program
    def outer(s: SyncBranch):
        first = part(s, "Who?")
        second = part(s, "Wh", site="y?")
        s += user("Sure?")
        s += assistant(gen("sure", SHORT))
        assert first and second == s["answer"]
        return [s["sure"], second]

    assert outer.run(client) == whole.run(client)


@PARTS
def test_a_part_may_run_on_a_fork_as_an_attempt_and_as_a_tool(client: Client, part):
    @program
    async def outer(s: Branch):
        s += user("Begin.")
        s += assistant("Yes?")
        branches = s.fork(3)
        _, raced = await race(branches[:2], lambda branch: part(branch, "Who?"))
        return raced, await s.tool(part, branches[2], "Who?")

    raced, called = outer.run(client)
    assert raced == called


@PARTS
def test_what_a_part_raises_is_the_callers_to_catch(client: Client, part):
    @program
    async def fails(s: Branch):
        raise LookupError("nothing there")

    @program
    async def outer(s: Branch):
        with pytest.raises(LookupError, match="nothing there"):
            await fails(s)
        with pytest.raises(ProgramError, match="outside of a role"):
            await part(s, "Who?")
            s += "bare"
            await s.wait()
        return "went on"

    assert outer.run(client) == "went on"


def test_a_part_is_a_step_of_the_trace(client: Client):
    @program
    async def outer(s: Branch):
        (branch,) = s.fork(1)
        await ask(branch, "Who?")  # the call
        with pytest.raises(LookupError):
            await fails(branch)

    @program
    async def fails(s: Branch):
        raise LookupError("nothing there")

    with trace() as t:
        outer.run(client)
    (run,) = t.runs
    called, said, *_, generated, failed = run.by_branch()["0"]
    assert [(s.kind, s.name) for s in (called, failed)] == [("program", "ask"), ("program", "fails")]
    assert (said.kind, generated.kind) == ("text", "gen")
    assert called.began <= generated.began <= generated.ended <= called.ended <= failed.began
    assert "# the call" in called.site.source and failed.finish == "error: LookupError: nothing there"
    line = next(line for line in t.text().splitlines() if "program ask" in line)
    assert " ms" in line and 'class="program"' in t.html()


def test_a_part_cannot_go_on_where_a_program_has_ended(client: Client):
    @program
    async def keeps(s: Branch) -> Branch:
        return s

    async def late():
        branch = await keeps(client.aio)
        with pytest.raises(RuntimeError, match="keeps has ended"):
            await ask(branch, "Who?")

    client.run(late())
