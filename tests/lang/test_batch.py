"""A program for many arguments."""

from __future__ import annotations

import asyncio

import pytest

from radixrt import Branch, ProgramError, Sampling, gen, program, use_client

SHORT = Sampling(max_tokens=4, temperature=0.0, ignore_eos=True)


@program
async def tell(s: Branch, text: str) -> str:
    if text == "no":
        raise LookupError(text)
    s += text
    s += gen("rest", SHORT)
    return text + await s["rest"]


def test_results_are_in_the_order_of_the_calls(client):
    texts = [f"Story {number}" for number in range(20)]
    expected = [tell.run(client, text) for text in texts]
    found = tell.run_batch([{"text": text} for text in texts], client, at_once=3)
    assert found == expected
    use_client(client)
    try:
        assert tell.run_batch({"text": text} for text in texts[:2]) == expected[:2]
    finally:
        use_client(None)
    assert tell.run_batch([], client) == []


def test_no_more_run_at_once_and_calls_are_asked_for_as_there_is_room(client):
    running, most, asked = 0, 0, 0

    @program
    async def count(s: Branch, number: int) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        assert asked <= number + 4, "a call was asked for before there was room"
        await asyncio.sleep(0.001 * (number % 3))
        running -= 1
        return number

    def calls():
        nonlocal asked
        for number in range(30):
            asked += 1
            yield {"number": number}

    assert count.run_batch(calls(), client, at_once=4) == list(range(30))
    assert most == 4 and running == 0


def test_an_exception_stands_in_its_place(client):
    calls = [{"text": "One"}, {"text": "no"}, {"text": "Two"}, {"wrong": 1}]
    one, no, two, wrong = tell.run_batch(calls, client, return_exceptions=True)
    assert one.startswith("One") and two.startswith("Two")
    assert isinstance(no, LookupError) and isinstance(wrong, TypeError)


def test_the_first_exception_ends_it(client):
    ended, begun = [], []

    @program
    async def wait(s: Branch, number: int) -> None:
        begun.append(number)
        if number == 2:
            s += gen("x", max_tokens=-1)
            await s["x"]
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(number)

    with pytest.raises(ProgramError):
        wait.run_batch(({"number": number} for number in range(9)), client, at_once=4)
    assert sorted(ended) == [0, 1, 3] and len(begun) == 4, "who ran was cancelled, nobody else begun"


def test_after_the_first_exception_nobody_is_begun(client):
    """Also if others end at the same time as who fails."""
    begun = []

    @program
    async def fail(s: Branch, number: int) -> None:
        begun.append(number)
        await asyncio.sleep(0)
        if number == 0:
            raise LookupError

    with pytest.raises(LookupError):
        fail.run_batch(({"number": number} for number in range(20)), client, at_once=4)
    assert begun == [0, 1, 2, 3]


def test_a_run_that_is_cancelled_from_within_is_one_of_them(client):
    @program
    async def tell(s: Branch, number: int) -> int:
        if number == 1:
            raise asyncio.CancelledError
        return number

    zero, one, two = tell.run_batch(({"number": number} for number in range(3)), client, return_exceptions=True)
    assert (zero, two) == (0, 2) and isinstance(one, asyncio.CancelledError)

    @program
    async def wait(s: Branch) -> None:
        await asyncio.sleep(60)

    async def cancelled() -> None:
        task = asyncio.ensure_future(wait.batch(client.aio, [{}, {}], return_exceptions=True))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    client.run(cancelled())


def test_misuse(client):
    with pytest.raises(ValueError, match="at_once"):
        tell.run_batch([], client, at_once=0)
    with pytest.raises(TypeError, match="call 1 of a batch is str"):
        tell.run_batch([{"text": "a"}, "b"], client, return_exceptions=True)
    with pytest.raises(TypeError, match="run_batch needs a Client"):
        tell.run_batch([])
    with pytest.raises(ZeroDivisionError):
        tell.run_batch(({"text": str(1 // number)} for number in (1, 0)), client, return_exceptions=True)
