"""Races, tools, budgets, and what is left running: nothing."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from radixrt import Branch, BudgetExceeded, NoWinner, ProgramError, Sampling, SyncBranch, Tool, gen, program, race, user
from radixrt.client import Client, ServerError
from radixrt.lang.budget import Budget, within
from radixrt.lang.errors import Site, Spent
from radixrt.messages import MessageSegment
from tests.lang.conftest import wait_until_idle

SHORT = Sampling(max_tokens=8, temperature=0.0, ignore_eos=True)
ENDLESS = Sampling(max_tokens=100_000, ignore_eos=True)


def run(client, function, *args):
    return program(function).run(client, *args)


def line_of(text: str) -> int:
    lines = Path(__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line and "line_of" not in line)


# ---------------------------------------------------------------- races


def test_the_first_that_will_do_wins_and_the_others_stop(slow):
    async def first_right(s: Branch):
        s += "start"
        branches = s.fork(4)

        async def attempt(branch: Branch) -> str:
            number = int(branch.path)
            branch += gen("x", SHORT if number in (1, 2) else ENDLESS, max_tokens=[99_999, 5, 15, 99_999][number])
            branch += " and"
            branch += gen("y", SHORT, max_tokens=3)
            await branch["x"]
            return f"{number}:{len((await branch.value('x')).token_ids)}"

        winner, result = await race(branches, attempt, until=lambda said: said.startswith("2"))
        running = (await s._client.health())["runs_in_flight"]
        assert [branch.cancelled for branch in branches] == [True, True, False, True]
        winner += gen("z", SHORT)
        return winner.path, result, running, await winner["z"]

    path, result, running, more = run(slow, first_right)
    assert (path, result) == ("2", "2:15") and more
    assert running <= 1, "the losers' requests were gone before the race was over; the winner's own may go on"
    health = wait_until_idle(slow)
    assert health["counters"]["cancelled"] == 2
    pages = [(w["free_pages"], w["evictable_pages"], w["total_pages"]) for w in health["workers"]]
    assert all(free + evictable == total for free, evictable, total in pages), "no page is leased"


def test_a_race_for_a_name(slow):
    async def shortest(s: Branch):
        s += "start"
        branches = s.fork(3)
        for tokens, branch in zip((900, 4, 900), branches, strict=True):
            branch += gen("x", ENDLESS, max_tokens=tokens)
        winner, text = await race(branches, "x")
        return winner.path, text == await winner["x"]

    assert run(slow, shortest) == ("1", True)
    assert wait_until_idle(slow)["counters"]["cancelled"] == 2


def test_predicates_may_be_async_and_may_fail(slow):
    async def judged(s: Branch, until):
        s += "start"
        branches = s.fork(3)
        for tokens, branch in zip((3, 6, 90_000), branches, strict=True):
            branch += gen("x", ENDLESS, max_tokens=tokens)
        return (await race(branches, "x", until=until))[0].path

    seen = []

    async def second(text: str) -> bool:
        await asyncio.sleep(0)
        seen.append(text)
        return len(seen) == 2

    assert run(slow, judged, second) == "1"
    with pytest.raises(ZeroDivisionError):
        run(slow, judged, lambda _: 1 // 0)
    assert wait_until_idle(slow)["counters"]["cancelled"] == 1 + 2


def test_nobody_wins(client):
    async def hopeless(s: Branch):
        s += "start"
        branches = s.fork(3)
        for branch in branches[:2]:
            branch += gen("x", SHORT)
        branches[2] += gen("x", SHORT, top_p=7.0)
        with pytest.raises(NoWinner) as caught:
            await race(branches, "x", until=lambda text: False)  # the race
        branches[0] += gen("more", SHORT)
        return caught.value, await branches[0]["x"], await branches[0]["more"]

    error, text, more = run(client, hopeless)
    assert error.site.line == line_of("# the race") and isinstance(error, ProgramError)
    assert "no branch won: 2 results were refused, 1 branches failed" in str(error) and "top_p" in str(error)
    assert error.results == {"0": text, "1": text} and more

    async def empty(s: Branch):
        await race([], "x")

    with pytest.raises(ValueError, match="at least one"):
        run(client, empty)


@pytest.mark.parametrize("face", ["async", "plain"])
def test_a_race_that_nobody_wins_keeps_what_the_attempts_failed_with(client, face):
    errors = {"1": KeyError("japan"), "2": ZeroDivisionError()}

    def fail(path: str) -> str:
        if path in errors:
            raise errors[path]
        return path

    async def attempt(branch: Branch) -> str:
        return fail(branch.path)

    async def hopeless(s: Branch):
        s += "start"
        await race(s.fork(3), attempt, until=lambda path: False)

    def hopeless_plainly(s: SyncBranch):
        s += "start"
        s.race(s.fork(3), lambda branch: fail(branch.path), until=lambda path: False)

    with pytest.raises(NoWinner) as caught:
        run(client, hopeless if face == "async" else hopeless_plainly)
    error = caught.value
    assert error.results == {"0": "0"} and error.problems == errors
    assert error.__cause__ is next(iter(error.problems.values()))
    if error.__cause__ is errors["1"]:
        assert "1 results were refused, 2 branches failed, the first with: KeyError: 'japan'" in str(error)


def test_an_error_names_its_type_unless_it_is_the_servers_or_the_budgets(client):
    async def fails(s: Branch, problem: Exception):
        def tool() -> None:
            raise problem

        with pytest.raises(ProgramError) as caught:
            await s.tool(tool)
        return str(caught.value).splitlines()[0].partition(": ")[2]

    for problem, said in (
        (KeyError("japan"), "KeyError: 'japan'"),
        (ValueError(), "ValueError"),
        (ServerError(429, "too much"), "too much (429)"),
    ):
        assert run(client, fails, problem) == said

    async def spends(s: Branch):
        with s.budget(tokens=0):
            s += gen("x", SHORT)
        with pytest.raises(BudgetExceeded) as caught:
            await s["x"]
        return str(caught.value)

    assert ": the budget of 0 tokens" in run(client, spends)


def test_a_branch_whose_work_fails_is_out_at_once(slow):
    async def some_fail(s: Branch):
        s += "start"
        branches = s.fork(3)

        async def attempt(branch: Branch) -> int:
            branch += gen("x", ENDLESS, max_tokens=40 if branch.path == "2" else 90_000)
            if branch.path == "2":
                await branch["x"]
                return (await s._client.health())["runs_in_flight"]
            await asyncio.sleep(0.05)
            raise LookupError(branch.path)

        return await race(branches, attempt)

    winner, running = run(slow, some_fail)
    assert winner.path == "2" and running == 0, "what the others had asked for was cancelled before anybody won"


def test_a_race_that_is_cancelled_stops_all(slow):
    async def endless(s: Branch):
        s += "start"
        branches = s.fork(3)
        for branch in branches:
            branch += gen("x", ENDLESS)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await race(branches, "x")
        return [branch.cancelled for branch in branches], (await s._client.health())["runs_in_flight"]

    assert run(slow, endless) == ([True] * 3, 0)


def test_a_race_of_plain_functions(slow):
    ended = threading.Event()

    def solve(s: SyncBranch):
        s += "start"

        def attempt(branch: SyncBranch) -> int:
            tokens = (5, 12, 90_000)[int(branch.path)]
            branch += gen("x", ENDLESS, max_tokens=tokens)
            try:
                return len(branch.value("x").token_ids)
            except ProgramError:
                ended.set()
                raise

        winner, result = s.race(s.fork(3), attempt, until=lambda tokens: tokens > 5)
        named, text = s.race([*s.fork(1)], lambda branch: branch.path)
        return winner.path, result, named.path, text

    assert run(slow, solve) == ("1", 12, "3", "3")
    assert ended.wait(5), "the loser's thread was told"
    assert wait_until_idle(slow)["counters"]["cancelled"] == 1


# ---------------------------------------------------------------- tools


def test_tools(client):
    where = []

    def plain(a: int, b: int = 1) -> int:
        where.append(threading.current_thread())
        return a + b

    async def slowly(text: str) -> dict:
        await asyncio.sleep(0)
        return {"found": [text]}

    async def agent(s: Branch):
        s += user("Add.")
        loop_thread = threading.current_thread()
        total = await s.tool(plain, 2, b=40)
        found = await s.tool(slowly, "x", append="tool")
        await s.tool(str, "text", append="tool")
        s += gen("x", SHORT)
        await s.wait()
        return total, found, loop_thread not in where, s._speaker.history.transcript[:3]

    total, found, elsewhere, messages = run(client, agent)
    assert (total, found, elsewhere) == (42, {"found": ["x"]}, True)
    assert messages[1:] == [MessageSegment("tool", '{"found":["x"]}'), MessageSegment("tool", "text")]

    def agent_in_a_thread(s: SyncBranch):
        return s.tool(plain, 1), s.tool(slowly, "y")

    assert run(client, agent_in_a_thread) == (2, {"found": ["y"]})


@pytest.mark.parametrize("face", ["async", "plain"])
def test_a_tool_gets_its_own_arguments_whatever_they_are_called(client, face):
    def fetch(url: str, function: str = "", timeout: float = 0, append: bool = False) -> tuple:
        return url, function, timeout, append

    def options(**given: object) -> dict:
        return given

    def calls(s):
        yield s.tool(fetch, "x", function="f", timeout=9, append=True)
        yield s.tool(options, timeout=1, self=2)
        yield s.tool(Tool(fetch, timeout=5, append="tool"), "y", timeout=7)
        yield s.tool(str, "text", timeout=5, append="tool")

    async def agent(s: Branch):
        s += user("Go.")
        return [await call for call in calls(s)], await s.messages()

    def plain_agent(s: SyncBranch):
        s += user("Go.")
        return list(calls(s)), s.messages()

    results, messages = run(client, agent if face == "async" else plain_agent)
    assert results == [("x", "f", 9, True), {"timeout": 1, "self": 2}, ("y", "", 7, False), "text"]
    assert [one["content"] for one in messages] == ["Go.", '["y","",7,false]', "text"]


def test_a_tool_does_not_hold_up_the_loop(client):
    goes_on = threading.Event()

    async def agent(s: Branch):
        s += "start"
        other, waiting = s.fork(2)
        waits = asyncio.ensure_future(waiting.tool(goes_on.wait, 30))
        other += gen("x", SHORT)
        await other["x"]
        goes_on.set()
        return await waits

    assert run(client, agent)


@pytest.mark.parametrize("face", ["async", "plain"])
def test_a_tools_error_points_to_the_line(client, face):
    def broken(text: str) -> None:
        raise LookupError(f"no {text}")

    async def agent(s: Branch):
        s += "start"
        try:
            await s.tool(broken, "luck")  # the async call
        except ProgramError as error:
            s += " all the same"
            s += gen("x", SHORT)
            return error, await s["x"]

    def plain_agent(s: SyncBranch):
        s += "start"
        try:
            s.tool(broken, "luck")  # the plain call
        except ProgramError as error:
            s += gen("x", SHORT)
            return error, s["x"]

    error, text = run(client, agent if face == "async" else plain_agent)
    assert error.site.line == line_of(f"# the {face} call") and ": LookupError: no luck\n" in str(error) and text
    assert isinstance(error.__cause__, LookupError)


def test_a_tool_that_takes_too_long(client):
    async def agent(s: Branch, function, error):
        with pytest.raises(ProgramError, match=error):
            await s.tool(function, 5, timeout=0.05)

    async def own(_: float) -> None:
        raise TimeoutError("mine")

    for function, error in (
        (asyncio.sleep, "sleep: no result in 0.05 seconds"),
        (time.sleep, "no result"),
        (own, "mine"),
    ):
        began = time.monotonic()
        run(client, agent, function, error)
        assert time.monotonic() - began < 4.5


def test_a_tool_may_exit_the_program(client):
    async def agent(s: Branch):
        await s.tool(exit, 3)

    with pytest.raises(SystemExit):
        run(client, agent)
    assert client.health()["serving"]


def long_tool() -> tuple[Callable[[], Awaitable[None]], list[str]]:
    """A tool that takes a minute, and a list that gets an entry whenever a call of it ends."""
    ends = []

    async def long() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ends.append("ended")

    return long, ends


def test_a_tool_ends_with_its_branch(client):
    long, ends = long_tool()

    async def agent(s: Branch):
        s += "start"
        branch, other = s.fork(2)
        call = asyncio.ensure_future(branch.tool(long))
        await asyncio.sleep(0.02)
        await branch.cancel()
        with pytest.raises(ProgramError, match="cancelled"):
            await asyncio.wait_for(call, 1)
        with pytest.raises(ProgramError, match="cancelled"):
            await branch.tool(long)
        asyncio.ensure_future(other.tool(long))  # noqa: RUF006  (nobody waits for it)
        await asyncio.sleep(0.02)

    run(client, agent)
    client.run(asyncio.sleep(0.02))
    assert ends == ["ended"] * 2


def test_a_tool_whose_branch_ends_at_once_leaves_nothing_that_was_not_awaited(client):
    async def agent(s: Branch):
        s += "start"
        branch, _ = s.fork(2)
        call = asyncio.ensure_future(branch.tool(asyncio.sleep, 60))
        await asyncio.sleep(0)
        await branch.cancel()
        with pytest.raises(ProgramError, match="cancelled"):
            await asyncio.wait_for(call, 1)

    run(client, agent)
    gc.collect()


def test_a_tool_ends_with_who_waits_for_it(client):
    long, ends = long_tool()

    async def agent(s: Branch):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await s.tool(long)
        await asyncio.sleep(0.02)
        return list(ends)

    assert run(client, agent) == ["ended"]


# ---------------------------------------------------------------- budgets


def test_tokens_of_a_subtree(slow):
    async def spend(s: Branch):
        s += "start"
        (s,) = s.fork(1)
        with s.budget(tokens=60) as budget:
            s += gen("a", ENDLESS, max_tokens=20)
            branches = s.fork(3)
            for branch in branches:
                branch += gen("b", ENDLESS)  # the spender
        outside = s.fork(1)[0]
        outside += gen("c", ENDLESS, max_tokens=70)
        errors = await asyncio.gather(*(branch["b"] for branch in branches), return_exceptions=True)
        running = (await s._client.health())["runs_in_flight"]
        branches[0] += gen("d", SHORT)
        with pytest.raises(BudgetExceeded):
            await branches[0]["d"]
        return budget, errors, running, len((await outside.value("c")).token_ids)

    budget, errors, running, outside = run(slow, spend)
    assert all(isinstance(error, BudgetExceeded) for error in errors)
    assert all(error.site.line == line_of("# the spender") and error.text for error in errors)
    assert "the budget of 60 tokens (test_control.py:" in str(errors[0])
    assert 60 <= budget.used <= 60 + 3 * 3 and budget.left == 0, "no more than what was under way"
    assert running <= 1 and outside == 70
    assert wait_until_idle(slow)["counters"]["cancelled"] == 3


def test_one_gen_is_cut_by_max_tokens(client):
    async def spend(s: Branch, wanted: int, allowed: int):
        s += "start"
        (s,) = s.fork(1)
        with s.budget(tokens=allowed) as budget:
            s += gen("x", ENDLESS, max_tokens=wanted, min_tokens=wanted)
        try:
            return budget, (await s.value("x")).text
        except BudgetExceeded as error:
            return budget, error

    budget, error = run(client, spend, 50, 17)
    assert isinstance(error, BudgetExceeded) and budget.used == 17
    assert error.text == client.generate("start", Sampling(max_tokens=17, ignore_eos=True)).text or error.text
    budget, text = run(client, spend, 17, 17)
    assert isinstance(text, str) and (budget.used, budget.left) == (17, 0), "it has had what it wanted"
    budget, error = run(client, spend, 5, 0)
    assert isinstance(error, BudgetExceeded) and error.text == "" and budget.used == 0
    assert client.health()["counters"].get("cancelled", 0) == 0


def test_budgets_nest(client):
    async def spend(s: Branch):
        s += "start"
        with s.budget(tokens=30) as outer:
            (first,) = s.fork(1)
            with first.budget(tokens=100) as inner:
                assert inner.left == 30
                first += gen("x", SHORT)
            await first["x"]
            assert (outer.used, inner.used, inner.left) == (8, 8, 22)
            (second,) = s.fork(1)
            with second.budget(tokens=10, seconds=50) as narrow:
                second += gen("x", ENDLESS)
            with pytest.raises(BudgetExceeded, match="of 10 tokens"):
                await second["x"]
            assert (outer.used, narrow.used) == (18, 10)
            with first.budget(tokens=1000):
                first += gen("y", ENDLESS)
            with pytest.raises(BudgetExceeded, match="of 30 tokens"):
                await first["y"]
        s += gen("free", SHORT, max_tokens=40)
        return outer.used, len((await s.value("free")).token_ids)

    assert run(client, spend) == (30, 40)


@pytest.mark.parametrize("what", ["gen", "tool", "stream"])
def test_seconds(slow, what):
    async def spend(s: Branch):
        s += "start"
        (s,) = s.fork(1)
        with s.budget(seconds=0.15) as budget:
            if what == "tool":
                work = s.tool(asyncio.sleep, 60)
            else:
                s += gen("x", ENDLESS, stream=what == "stream")
                work = s["x"]
        with pytest.raises(BudgetExceeded, match="of 0.15 seconds"):
            await work
        return budget.seconds_left, (await s._client.health())["runs_in_flight"]

    began = time.monotonic()
    assert run(slow, spend) == (0, 0)
    assert 0.1 < time.monotonic() - began < 30


def test_what_is_stopped_already_may_be_stopped_again():
    """By a budget above it, in the turn in which its own has fired."""

    async def spend() -> None:
        outer = Budget(10, None, None, Site("a.py", 1))
        inner = Budget(5, None, outer, Site("a.py", 2))

        async def wait() -> None:
            async with within(inner):
                await asyncio.Event().wait()

        waiting = asyncio.create_task(wait())
        await asyncio.sleep(0)
        inner.charge(5)
        await asyncio.sleep(0)
        outer.charge(5)
        with pytest.raises(Spent, match="5 tokens"):
            await waiting
        assert outer.left == 0

    asyncio.run(spend())


def test_what_is_no_budget(client):
    async def wrong(s: Branch, **limits):
        s.budget(**limits)

    for limits in ({}, {"tokens": -1}, {"seconds": -1.0}):
        with pytest.raises(ValueError):
            program(wrong).run(client, **limits)


def test_budgets_of_plain_programs(client):
    def spend(s: SyncBranch):
        s += "start"
        with s.budget(tokens=5) as budget:
            s += gen("x", ENDLESS)  # the plain spender
            s["x"]
        return budget

    with pytest.raises(BudgetExceeded) as caught:
        run(client, spend)
    assert caught.value.site.line == line_of("# the plain spender")


# ---------------------------------------------------------------- what fails takes with it what is below


def test_a_failure_cancels_the_subtree_and_nothing_else(slow):
    async def broken(s: Branch):
        s += "start"
        bad, good = s.fork(2)
        (below,) = bad.fork(1)
        (deeper,) = below.fork(1)
        for branch in (below, deeper):
            branch += gen("x", ENDLESS)
        good += gen("x", ENDLESS, max_tokens=60)
        bad += gen("y", SHORT)
        bad += gen("z", SHORT, top_p=7.0)  # what fails
        for work in (bad["z"], below["x"], deeper["x"], deeper.wait()):
            with pytest.raises(ProgramError, match="top_p") as caught:
                await asyncio.wait_for(asyncio.ensure_future(_text(work)), 2)
            assert caught.value.site.line == line_of("# what fails")
        running = (await s._client.health())["runs_in_flight"]
        return running, len((await good.value("x")).token_ids)

    assert run(slow, broken) == (1, 60)
    assert wait_until_idle(slow)["counters"]["cancelled"] == 2


async def _text(work):
    return await work


def test_nothing_is_begun_after_the_end(slow):
    late = []

    async def leaves_a_task(s: Branch):
        s += "start"
        (branch,) = s.fork(1)

        async def append_later() -> None:
            await asyncio.sleep(0.1)
            for work in (lambda: s.fork(1), lambda: branch.__iadd__(gen("x", ENDLESS))):
                with pytest.raises(RuntimeError, match="leaves_a_task has ended"):
                    work()
                late.append(1)

        leaves_a_task.task = asyncio.ensure_future(append_later())

    run(slow, leaves_a_task)
    slow.run(asyncio.sleep(0.2))
    assert len(late) == 2 and slow.health()["counters"]["requests"] == 0


# ---------------------------------------------------------------- how requests are sent


def test_a_fork_is_one_message_and_branches_ask_together(client: Client):
    sent: list[tuple[str, int]] = []
    turns = 0

    async def wide(s: Branch):
        nonlocal turns
        transport = s._client._transport
        submit, loop = transport.submit, asyncio.get_running_loop()

        def count() -> None:
            nonlocal turns
            turns += 1
            loop.call_soon(count)

        transport.submit = lambda request, on_answer: (
            sent.append((type(request).__name__, turns)),
            submit(request, on_answer),
        )[1]
        try:
            s += "a prefix that all of them share"
            s += gen("x", SHORT)
            await s.wait()
            assert [kind for kind, _ in sent] == ["Generate"]
            loop.call_soon(count)
            for branch in s.fork(25):
                for below in branch.fork(5):
                    below += gen("y", SHORT)
            await s.wait()
            await asyncio.gather(*(branch["y"] for branch in s.family() if branch.depth == 2))
        finally:
            transport.submit = submit

    run(client, wide)
    kinds = [kind for kind, _ in sent]
    assert sorted(kinds) == ["Fork"] * 26 + ["Generate"] * 126
    asked = [turn for kind, turn in sent[1:] if kind == "Generate"]
    assert len(set(asked)) == 1, "all in one turn of the event loop"
