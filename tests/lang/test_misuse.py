"""What programs get wrong is said at once, with what to write instead; nothing waits for ever."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import pickle

import pytest

from radixrt import (
    Branch,
    BudgetExceeded,
    NoWinner,
    ProgramError,
    Sampling,
    SyncBranch,
    assistant,
    cli,
    gen,
    join,
    program,
    race,
    select,
    trace,
    user,
)
from radixrt.client import Completion, ServerError
from radixrt.lang.errors import Site, Spent
from radixrt.lang.history import History
from radixrt.lang.nodes import Fields
from radixrt.lang.values import Text
from radixrt.messages import Usage

SHORT = Sampling(max_tokens=8, temperature=0.0, ignore_eos=True)


def run(client, function, *args):
    """In time: a program that waits for itself is cancelled."""

    async def in_time():
        return await asyncio.wait_for(program(function)(client.aio, *args), 5)

    return client.run(in_time())


# ---------------------------------------------------------------- await


USES = {
    "str": str,
    "format": "{}".format,
    "f-string": lambda text: f"{text:>9}",
    "print": print,
    "==": lambda text: text == "yes",
    "== another": lambda text: text == Text("so", None),
    "!=": lambda text: text != "yes",
    "<": lambda text: text < "yes",
    "if": bool,
    "not": lambda text: not text,
    "len": len,
    "list": list,
    "in": lambda text: "yes" in text,
    "text +": lambda text: text + "!",
    "+ text": lambda text: "!" + text,
    "index": lambda text: text[0],
    "slice": lambda text: text[:-1],
    "int": int,
    "float": float,
    "%": lambda text: "%s" % text,  # noqa: UP031
    "user": lambda text: user("It is ", text),
    "assistant": assistant,
    "select": lambda text: select("x", ["yes", text]),
}


@pytest.mark.parametrize("use", USES)
def test_text_that_is_not_awaited_cannot_be_used_as_text(client, use):
    async def forgetful(s: Branch):
        s += "Is it so? "
        s += gen("so", SHORT)
        with pytest.raises(TypeError, match=r"write await s\['so'\]"):
            USES[use](s["so"])
        with pytest.raises(TypeError, match=r"write await s\['so'\]"):
            s += s["so"]

    run(client, forgetful)


def test_text_that_is_not_awaited_has_no_methods_of_text(client):
    async def forgetful(s: Branch):
        s += "Is it so? "
        s += gen("so", SHORT)
        assert not hasattr(s["so"], "strip")
        s["so"].strip()

    with pytest.raises(AttributeError, match=r"no strip here: .* write await s\['so'\]"):
        run(client, forgetful)


def test_text_that_is_not_awaited_may_be_kept_shown_and_waited_for(client):
    async def careful(s: Branch):
        s += "Is it so? "
        s += gen("so", SHORT)
        s += gen("why", SHORT)
        so, why = s["so"], s["why"]
        names = {so: "so", why: "why"}
        assert names[so] == "so" and so in {why, so} and "so" in repr(so)
        texts = await asyncio.gather(so, why, so)
        return texts[0] == texts[2] == await asyncio.wait_for(so, 5) == await asyncio.ensure_future(so)

    assert run(client, careful)


def test_what_is_to_be_awaited_is_named_where_text_is_expected(client):
    async def forgetful(s: Branch):
        value = s.value("so")
        with contextlib.closing(value), pytest.raises(TypeError, match="not coroutine, which is to be awaited"):
            user(value)

    run(client, forgetful)


# ---------------------------------------------------------------- waiting for oneself


@pytest.mark.parametrize(
    "use",
    [
        lambda s: s["x"],
        lambda s: s.__iadd__("more"),
        lambda s: s.fork(2),
        lambda s: s.wait(),
        lambda s: s.tool(str),
        lambda s: list(s.stream("x")),
        lambda s: inner(s),
    ],
)
def test_a_plain_branch_cannot_be_used_on_its_event_loop(client, use):
    def outer(s: SyncBranch):
        s += "start"
        s += gen("x", SHORT, stream=True)

        async def on_the_loop():
            use(s)

        with pytest.raises(ProgramError, match="use it in plain functions, or make the program an async one") as caught:
            s.tool(on_the_loop, timeout=3)
        assert isinstance(caught.value.problem, RuntimeError)
        return s["x"]

    assert run(client, outer)


@program
def inner(s: SyncBranch) -> None:
    s += "inner"


def test_a_program_cannot_yield():
    def plain(s: SyncBranch):
        yield 1

    async def asynchronous(s: Branch):
        yield 1

    for function in (plain, asynchronous):
        with pytest.raises(TypeError, match=f"program {function.__name__}: .* cannot yield"):
            program(function)


async def _asks(s: Branch):
    s += "start"
    s += gen("x", SHORT)
    return await s["x"]


def test_a_decorator_of_an_async_function_makes_an_async_program(client):
    @functools.wraps(_asks)
    def decorated(*args):
        return _asks(*args)

    assert run(client, decorated) == run(client, _asks)


def test_what_stands_for_an_async_function_may_return_a_value(client):
    @functools.wraps(_asks)
    def known(s: Branch):
        return "known"

    assert run(client, known) == "known"


def test_text_that_is_not_awaited_can_be_copied(client):
    async def copies(s: Branch):
        s += "start"
        s += gen("x", SHORT)
        return await copy.copy(s["x"]) == await s["x"]

    assert run(client, copies)


def test_a_plain_function_that_returns_something_to_be_awaited_is_no_program(client):
    def undecorated(*args):
        return _asks(*args)

    with pytest.raises(TypeError, match="program undecorated: .*to be awaited .coroutine.*functools.wraps"):
        run(client, undecorated)


def test_a_tool_may_exit_a_plain_program(client):
    def leaves(s: SyncBranch):
        s.tool(exit, 3)

    with pytest.raises(SystemExit) as caught:
        program(leaves).run(client)
    assert caught.value.code == 3 and client.health()["serving"], "the client goes on"


# ---------------------------------------------------------------- where to run


@pytest.mark.parametrize("traced", [True, False])
def test_a_program_says_what_its_first_argument_is(client, traced):
    async def asks(s: Branch, question: str):
        raise AssertionError("it is not run")

    def asks_plainly(s: SyncBranch, question: str):
        raise AssertionError("it is not run")

    with trace() if traced else contextlib.nullcontext():
        for asked in map(program, (asks, asks_plainly)):
            for wrong in ("hi", None, client, asked):
                with pytest.raises(TypeError, match="an AsyncClient or a branch, not .*run takes a Client") as caught:
                    asked(wrong, "hi")
                assert f"not {type(wrong).__name__}" in str(caught.value)
                assert caught.value.__context__ is None
            with pytest.raises(TypeError, match="run takes a Client; give AsyncClient to"):
                asked.run(client.aio, "hi")


def test_a_program_on_a_client_that_is_closed_says_so(client):
    async def closed():
        client.aio._closed = True
        try:
            with pytest.raises(RuntimeError, match="client is closed"):
                await program(_asks)(client.aio)
        finally:
            client.aio._closed = False

    client.run(closed())


# ---------------------------------------------------------------- nodes


def test_choices_are_several_texts():
    with pytest.raises(TypeError, match=r"select 'x': choices are several texts, not one: write \['yes', ...\]"):
        select("x", "yes")
    for wrong, kind in ((["yes", 7], "int"), ([b"no"], "bytes"), (["yes", None], "NoneType"), ([["yes"]], "list")):
        with pytest.raises(TypeError, match=f"select 'x': a choice must be text, not {kind}"):
            select("x", wrong)
    for empty in (iter(()), (choice for choice in ["yes", ""])):
        with pytest.raises(ValueError, match="not empty"):
            select("x", empty)


def test_choices_may_come_from_a_generator(client):
    async def judge(s: Branch):
        s += "Is it so? "
        s += select("x", (text for text in ("yes", "no")))
        return await s.value("x")

    assert set(run(client, judge).scores) == {"yes", "no"}


def test_what_is_no_sampling_is_said_to_be_none():
    with pytest.raises(TypeError, match="gen 'a': expected a Sampling, not int: write max_tokens=32"):
        gen("a", 32)
    with pytest.raises(TypeError, match="gen 'a': expected a Sampling, not dict$"):
        gen("a", {"max_tokens": 32})


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"max_new_tokens": 16}, "gen 'a': there is no field max_new_tokens: write max_tokens=16"),
        ({"max_completion_tokens": 16}, "write max_tokens=16"),
        ({"choices": ["yes", "no"]}, r"gen 'a': .* write select\('a', \[\.\.\.\]\)"),
        ({"json_schema": "{}"}, "write schema='{}'"),
        ({"response_format": {"type": "json_object"}}, "write schema=$"),
        ({"guided_regex": "a+"}, r"write regex='a\+'"),
        ({"top_logprobs_num": 3}, "write logprobs=3"),
        ({"n": 4}, r"write s\.fork\(n\)"),
        ({"temprature": 0.5}, "write temperature=0.5"),
        ({"zzz": 1}, "it has .*regex.*max_tokens, .*grammar"),
    ],
)
def test_a_word_of_another_engine_is_answered_with_ours(fields, said):
    with pytest.raises(TypeError, match=said):
        gen("a", **fields)


def test_type_checkers_know_all_fields_of_sampling():
    assert set(Fields.__annotations__) == set(Sampling.__struct_fields__)


# ---------------------------------------------------------------- several branches


def test_join_takes_branches_or_a_list_of_them(client):
    async def joins(s: Branch):
        s += "start"
        branches = s.fork(2)
        return [await join(*branches), await join(branches), await join(tuple(branches))], branches, await join()

    def joins_plainly(s: SyncBranch):
        s += "start"
        branches = s.fork(2)
        return [s.join(*branches), s.join(branches), s.join(tuple(branches))], branches, s.join()

    for function in (joins, joins_plainly):
        found, branches, none = run(client, function)
        assert found == [branches] * 3 and none == []


def test_a_plain_program_is_told_of_its_own_join_and_race(client):
    def plain(s: SyncBranch):
        s += "start"
        branches = s.fork(2)
        for misuse in (lambda: join(*branches), lambda: join(branches)):
            with pytest.raises(TypeError, match=r"join: .*not SyncBranch; a plain program writes s.join\(branches"):
                misuse()
        with pytest.raises(TypeError, match=r"race: .*not SyncBranch; a plain program writes s.race\(branches"):
            race(branches, "x")

    run(client, plain)


def test_a_branch_is_not_taken_for_a_list(client):
    async def asynchronous(s: Branch):
        race(*s.fork(2))

    def plain(s: SyncBranch):
        s.race(*s.fork(2))

    for function in (asynchronous, plain):
        with pytest.raises(TypeError, match="Branch' object is not iterable"):
            run(client, function)


def test_causes_that_go_in_a_circle_are_printed_once(capsys):
    one, other = ValueError("one"), ValueError("other")
    one.__cause__, other.__cause__ = other, one
    try:
        raise other
    except ValueError:
        cli._print_causes(one)
    assert capsys.readouterr().err.count("raise other") == 1


@pytest.mark.parametrize(
    "error",
    [
        ServerError(429, "too much", "n", retry_after=2.0),
        ProgramError(Site(__file__, 3), "0.1", ServerError(400, "bad", "top_p")),
        BudgetExceeded(Site(__file__, 3), "", Spent("no tokens are left", "Once upon")),
        NoWinner(Site(__file__, 3), {"0": "no"}, {"1": KeyError("x")}),
    ],
)
def test_errors_may_go_to_another_process(error):
    """A pool of processes pickles what its workers raise."""
    other = pickle.loads(pickle.dumps(error))
    assert type(other) is type(error) and str(other) == str(error)
    assert {name: str(value) for name, value in vars(other).items()} == {n: str(v) for n, v in vars(error).items()}


@pytest.mark.parametrize("begins", [
    lambda history: history.add_answer(Completion("so", b"", "stop", None, Usage()), SHORT, 1),
    lambda history: history.add_choice("so", 1),
])  # fmt: skip
def test_what_begins_with_an_answer_has_no_roles(begins):
    """As a program may whose tokenizer puts a token before any text."""
    history = History("scope")
    begins(history)
    assert history.text() == "so"
    with pytest.raises(ValueError, match="without roles"):
        history.messages()
    with pytest.raises(ValueError, match="began with text outside of roles"):
        history.add_message("user", "hello")
