"""Programs: what they say, what they share, and where they point when they fail."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

import pytest

from radixrt import (
    Branch,
    ProgramError,
    Sampling,
    ServerError,
    SyncBranch,
    assistant,
    gen,
    join,
    program,
    role,
    select,
    system,
    use_client,
    user,
)
from radixrt.client import token_bytes
from radixrt.messages import ChatPrompt, PartsPrompt, TextPrompt, TokenPrompt
from tests.lang.conftest import wait_until_idle
from tests.lang.oracle import Oracle

SHORT = Sampling(max_tokens=8, temperature=0.0, ignore_eos=True)


def run(client, function, *args):
    return program(function).run(client, *args)


def oracle_of(client, branch: Branch) -> Oracle:
    """What was said in a branch, put together by the reference."""
    return client.run(Oracle.of(client.aio, branch._speaker.history.transcript))


# ---------------------------------------------------------------- what is said


def test_text_and_gen(client):
    async def story(s: Branch):
        s += "Once upon"
        s += " a time"
        s += gen("middle", SHORT)
        s += " and then"
        s += gen("end", SHORT, max_tokens=3)
        return await s.value("middle"), await s.value("end")

    middle, end = run(client, story)
    alone = client.generate("Once upon a time", SHORT)
    assert (middle.text, middle.token_ids) == (alone.text, alone.token_ids)
    assert len(end.token_ids) == 3 and end.finish == "length"
    assert end.usage.prompt_tokens == alone.usage.prompt_tokens + 8 + len(client.tokenize(" and then"))
    assert end.usage.cached_tokens == alone.usage.prompt_tokens + 8 - 1, "all but the last generated token"


def test_roles_are_the_template(client):
    async def chat(s: Branch):
        s += system("Be brief.")
        s += user("Hello", " there")
        s += assistant(gen("answer", SHORT))
        s += user("More?")
        s += assistant("Well, ", gen("rest", SHORT))
        return await s.value("answer"), await s.value("rest"), s

    answer, rest, branch = run(client, chat)
    history = oracle_of(client, branch)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello there"}]
    assert answer.text == client.generate(messages, SHORT).text
    assert answer.usage.prompt_tokens == len(client.tokenize(messages))
    messages += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": "More?"}]
    messages.append({"role": "assistant", "content": "Well, "})
    rendered = client.run(client.aio.render(ChatPrompt(messages, partial=True)))
    assert history.text == rendered + rest.text
    assert history.messages[-1] == {"role": "assistant", "content": "Well, " + rest.text}
    generated = [part for part, _ in history._parts if isinstance(part, TokenPrompt)]
    assert [p.ids for p in generated] == [ids_of(answer), ids_of(rest)]
    assert rest.usage.cached_tokens >= answer.usage.prompt_tokens + 7


def ids_of(value) -> bytes:
    return token_bytes(value.token_ids)


def test_a_branch_tells_its_messages(client):
    async def chat(s: Branch):
        s += system("Be brief.")
        s += user("Hello", " there")
        s += assistant("Well, ", gen("answer", SHORT), " or ", select("so", ["yes", "no"]))
        (other,) = s.fork(1)
        other += user("More?")
        with pytest.raises(ValueError, match="it has messages"):
            await s.text()
        return await other.messages(), await s.messages(), s, other

    whole, begun, s, other = run(client, chat)
    assert whole == oracle_of(client, other).messages and begun == oracle_of(client, s).messages
    assert [message["role"] for message in whole] == ["system", "user", "assistant", "user"]

    def plainly(s: SyncBranch):
        s += user("Hello")
        s += gen("answer", SHORT)
        return s.messages(), s["answer"]

    messages, answer = run(client, plainly)
    assert messages == [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": answer}]


def test_a_branch_tells_its_text(client):
    async def story(s: Branch):
        assert (await s.text(), await s.messages()) == ("", [])
        s += "Once upon"
        s += gen("middle", SHORT)
        s += select("end", [" and", " or"])
        with pytest.raises(ValueError, match="it has text"):
            await s.messages()
        return await s.text(), f"Once upon{await s['middle']}{await s['end']}"

    def plainly(s: SyncBranch):
        s += "Once upon"
        s += gen("middle", SHORT)
        return s.text(), f"Once upon{s['middle']}"

    for function in (story, plainly):
        text, expected = run(client, function)
        assert text == expected


def test_a_turn_that_ends_itself_is_closed_once(client):
    """The end-of-turn token that was drawn is the one the template writes: not twice in the prompt."""
    end = client.tokenize([{"role": "user", "content": "x"}]).count(2)
    assert end == 1, "<|im_end|> is token 2"

    first = client.generate([{"role": "user", "content": "Hello"}], SHORT).token_ids[0]

    async def chat(s: Branch):
        s += user("Hello")
        s += assistant(gen("answer", Sampling(max_tokens=9, stop_token_ids=(first,))))
        s += user("Go on")
        s += assistant(gen("next", SHORT))
        return await s.value("answer"), await s.value("next")

    answer, following = run(client, chat)
    assert answer.finish == "stop" and len(answer.token_ids) == 1 and answer.text == ""
    expected = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": ""}]
    expected.append({"role": "user", "content": "Go on"})
    assert following.usage.prompt_tokens == len(client.tokenize(expected))


def test_a_turn_in_the_prompt_is_the_turn_of_the_template(client):
    """Where what was generated encodes to the ids that were drawn, the prompt is that of the same messages, id by id,
    the token that ended the turn included, once."""

    async def chat(s: Branch, question: str, sampling: Sampling):
        s += user(question)
        s += assistant(gen("answer", sampling))
        s += user("Go on")
        s += assistant(gen("next", SHORT))
        await s.value("next")
        return await s.value("answer"), s

    compared = 0
    for words in range(1, 60):
        question = "word " * words  # a fake worker draws by position
        drawn = client.generate([{"role": "user", "content": question}], SHORT).token_ids
        text = client.detokenize(drawn[:1])
        if drawn[0] == drawn[1] or not text or client.tokenize(TextPrompt(text, False)) != drawn[:1]:
            continue
        ending = Sampling(max_tokens=9, temperature=0.0, stop_token_ids=(drawn[1],))
        answer, branch = run(client, chat, question, ending)
        parts = [part for part, _ in oracle_of(client, branch)._parts[:-1]]
        assert (answer.token_ids, answer.finish, answer.text) == (drawn[:2], "stop", text)
        expected = [{"role": "user", "content": question}, {"role": "assistant", "content": text}]
        expected.append({"role": "user", "content": "Go on"})
        assert client.tokenize(PartsPrompt(parts)) == client.tokenize(expected)
        compared += 1
    assert compared >= 3


def test_a_stop_token_is_in_the_prompt_only_if_it_is_in_the_text(client):
    async def talk(s: Branch, include: bool, stop: int):
        s += "Tell me"
        s += gen("a", Sampling(max_tokens=9, temperature=0.0, stop_token_ids=(stop,), include_stop=include))
        s += "!"
        s += gen("b", SHORT)
        return await s.value("a"), await s.value("b")

    drawn = client.generate("Tell me", SHORT).token_ids
    tokens = len(client.tokenize("Tell me")) + len(client.tokenize("!"))
    for include in (False, True):
        a, b = run(client, talk, include, drawn[3])
        assert a.token_ids == drawn[:4]
        assert b.usage.prompt_tokens == tokens + 3 + include


def test_rendering_is_what_is_encoded(client):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Größe?"}]
    text = client.render(ChatPrompt(messages))
    assert client.tokenize(TextPrompt(text, add_special_tokens=False)) == client.tokenize(messages)
    assert text.endswith("<|im_start|>assistant\n")


def test_select_takes_the_likeliest(client):
    choices = ["yes", "no", "perhaps so"]

    async def judge(s: Branch, per_token: bool):
        s += "Is it so? "
        s += select("verdict", choices, per_token=per_token)
        s += " because"
        s += gen("why", SHORT)
        return await s.value("verdict"), await s.value("why")

    scored = client.score("Is it so?", [f" {choice}" for choice in choices]).logprobs
    for per_token in (True, False):
        verdict, why = run(client, judge, per_token)
        expected = {c: sum(x) / (len(x) if per_token else 1) for c, x in zip(choices, scored, strict=True)}
        assert verdict.scores == pytest.approx(expected)
        assert verdict.text == max(expected, key=expected.get)
        parts = [TextPrompt("Is it so?"), TextPrompt(f" {verdict.text}"), TextPrompt(" because")]
        assert why.usage.prompt_tokens == len(client.tokenize(PartsPrompt(parts)))
    assert client.report()["programs"][-1]["program"] == "judge"


@pytest.mark.parametrize("before", ["It is: ", " ", "It is:\n"])
def test_a_space_before_choices_is_scored_with_them(client, before):
    """Not as a token of its own, after which a word has other tokens than in texts; not if it is all that there is."""

    def judge(s: SyncBranch):
        s += before
        s += select("so", ["yes", "no"])
        return s.text(), s["so"], s.value("so").scores

    text, chosen, scores = run(client, judge)
    assert text == before + chosen
    moved = " " if before == "It is: " else ""
    logprobs = client.score(before.removesuffix(moved), [f"{moved}yes", f"{moved}no"]).logprobs
    assert list(scores.values()) == pytest.approx([sum(x) / len(x) for x in logprobs])

    def in_turn(s: SyncBranch):
        s += user("Is it so?")
        s += assistant("It is: ", select("so", ["yes"]))
        return s.messages()[-1]["content"]

    assert run(client, in_turn) == "It is: yes"


def test_a_choice_keeps_the_ids_that_were_scored(client):
    """ "help" + "ful" is not encoded as "helpful" afterwards."""

    async def judge(s: Branch):
        s += "The dog is "
        s += select("how", ["help"])
        s += "ful"
        s += gen("x", SHORT)
        return await s.value("x")

    parts = [TextPrompt("The dog is"), TextPrompt(" help"), TextPrompt("ful")]
    apart = len(client.tokenize(PartsPrompt(parts)))
    merged = len(client.tokenize(PartsPrompt([parts[0], TextPrompt(" helpful")])))
    assert apart != merged
    usage = run(client, judge).usage
    assert usage.prompt_tokens == apart
    assert usage.cached_tokens >= len(client.tokenize(PartsPrompt(parts[:2]))) - 1


def test_neighbours_become_one_part(client):
    async def long(s: Branch):
        for _ in range(5):
            s += "some"
            s += " text"
        for _ in range(5):
            s += gen("x", SHORT)
        await s.wait()
        return s, await s.value("x")

    branch, last = run(client, long)
    parts = [part for part, _ in oracle_of(client, branch)._parts]
    assert len(parts) == 2 and len(parts[1].ids) == 5 * 8 * 4
    assert last.usage.cached_tokens == last.usage.prompt_tokens - 1


def test_streaming(client):
    async def talk(s: Branch):
        s += "Tell me"
        s += gen("tale", SHORT, stream=True)
        pieces = [piece async for piece in s.stream("tale")]
        return pieces, await s["tale"]

    pieces, text = run(client, talk)
    assert "".join(pieces) == text == client.generate("Tell me", SHORT).text and len(pieces) > 1


def test_a_stream_may_be_read_again_and_by_forks(client):
    async def talk(s: Branch):
        s += "Tell me"
        s += gen("tale", SHORT, stream=True)

        async def read(branch: Branch) -> str:
            return "".join([piece async for piece in branch.stream("tale")])

        at_once = await asyncio.gather(*(read(branch) for branch in (s, *s.fork(2))))
        return [*at_once, await read(s)], await s["tale"]

    texts, text = run(client, talk)
    assert texts == [text] * 4


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("roles", [False, True])
def test_a_stop_string_keeps_the_ids_before_it(client, include, roles):
    """Wherever it begins and ends, in the middle of tokens too: the prompt says what the program was told."""
    opening = "Tell me"
    question = [{"role": "user", "content": opening}] if roles else opening
    sampling = Sampling(max_tokens=30, temperature=0.0, ignore_eos=True)
    whole = client.generate(question, sampling)

    async def talk(s: Branch, stop: str):
        s += user(opening) if roles else opening
        s += gen("tale", sampling, stop=stop, include_stop=include)
        s += user("more") if roles else " and more"
        s += gen("more", SHORT)
        await s.wait()
        return await s.value("tale"), await s.value("more"), s

    kept = []
    for at in range(6, 30, 3):
        stop = whole.text[at : at + 2]
        tale, more, branch = run(client, talk, stop)
        history = oracle_of(client, branch)
        assert tale.finish == "stop" and tale.text == whole.text[: whole.text.index(stop) + len(stop) * include]
        assert tale.text + ("<|im_end|>" if roles else " and more") in history.text
        ids = next((part.ids for part, _ in history._parts if isinstance(part, TokenPrompt)), b"")
        if ids == ids_of(more):
            ids = b""  # of the first gen none
        assert whole.ids.startswith(ids)
        assert more.usage.cached_tokens >= tale.usage.prompt_tokens + len(ids) // 4 - 1
        kept.append(len(ids) // 4 / len(tale.token_ids))
    assert max(kept) > 0.6


def test_stop_strings_end_the_text(client):
    whole = client.generate("Tell me", Sampling(max_tokens=40, temperature=0, ignore_eos=True)).text
    stop = whole[12:15]

    async def talk(s: Branch):
        s += "Tell me"
        s += gen("tale", max_tokens=40, temperature=0, ignore_eos=True, stop=stop)
        s += stop + " and more"
        s += gen("more", SHORT)
        await s.wait()
        return await s["tale"], s

    tale, branch = run(client, talk)
    text = oracle_of(client, branch).text
    assert tale == whole[: whole.index(stop)]
    assert text.startswith("Tell me" + tale + stop + " and more")


def test_a_name_may_be_used_again(client):
    async def loop(s: Branch):
        found = []
        s += "count:"
        for _ in range(3):
            s += gen("next", SHORT)
            found.append(s["next"])
        return [await text for text in found]

    texts = run(client, loop)
    assert len(texts) == 3 and len(set(texts)) > 1


def test_plain_functions(client):
    def loop(s: SyncBranch, question: str):
        s += f"Question: {question}\n"
        s += gen("a", SHORT)
        left, right = s.fork(2)
        left += " left!"
        left += gen("b", SHORT, stream=True)
        right += " right"
        right += gen("b", SHORT)
        s.join([left, right])
        return s["a"], "".join(left.stream("b")), left["b"], right["b"], right.path

    a, streamed, b, c, path = run(client, loop, "why?")
    assert a and streamed == b and b != c and path == "1"


def test_plain_programs_do_not_wait_for_each_others_threads(client):
    """More programs that wait for programs of their own than any pool has threads."""

    def inner(s: SyncBranch, i: int):
        s += f"inner {i}"
        s += gen("x", SHORT)
        return s["x"]

    def outer(s: SyncBranch, i: int):
        s += f"outer {i}"
        s += gen("x", SHORT)
        return s["x"] + run(client, inner, i)

    async def many():
        return await asyncio.gather(*(program(outer)(client.aio, i) for i in range(40)))

    assert len(set(client.run(asyncio.wait_for(many(), 20)))) > 5


def test_a_plain_program_may_end_as_it_likes(client):
    def stops(s: SyncBranch):
        return next(iter(()))

    with pytest.raises(RuntimeError, match="StopIteration"):
        run(client, stops)


def test_a_program_may_exit(client):
    async def leaves(s: Branch):
        raise SystemExit(3)

    def leaves_plainly(s: SyncBranch):
        raise SystemExit(4)

    for function, code in ((leaves, 3), (leaves_plainly, 4)):
        with pytest.raises(SystemExit) as caught:
            run(client, function)
        assert caught.value.code == code
    assert client.health()["serving"], "the client goes on"


def test_the_default_client_serves_all_threads(client):
    async def say(s: Branch):
        s += "x"
        s += gen("x", SHORT)
        return await s["x"]

    found = []
    use_client(client)
    try:
        thread = threading.Thread(target=lambda: found.append(program(say).run()))
        thread.start()
        thread.join(10)
    finally:
        use_client(None)
    assert found == [client.generate("x", SHORT).text]


def test_overrides_go_into_one_object():
    base = Sampling(temperature=0.5, top_k=7)
    node = gen("x", base, max_tokens=3, stop="\n", stop_token_ids=[5])
    assert node.sampling == Sampling(temperature=0.5, top_k=7, max_tokens=3, stop=("\n",), stop_token_ids=(5,))
    assert gen("x", base).sampling is base
    with pytest.raises(TypeError):
        gen("x", temprature=1.0)


# ---------------------------------------------------------------- what is shared


@pytest.mark.parametrize("touched", [True, False])
def test_a_fork_computes_its_prefix_once(client, touched):
    """Five ways off 2,000 tokens, on two workers with nothing cached, all at once."""
    prefix = "the quick brown fox thinks about the question again, and then the dog: " * 140

    async def fan_out(s: Branch):
        s += prefix
        if touched:
            s += gen("first", SHORT)
        branches = s.fork(5)
        for i, branch in enumerate(branches):
            branch += f" variant {i}"
            branch += gen("view", SHORT)
        return [(await branch.value("view")).usage for branch in branches]

    usages = run(client, fan_out)
    tokens = len(client.tokenize(prefix))
    assert tokens > 2000
    computed = sum(u.prompt_tokens - u.cached_tokens for u in usages)
    tails = sum(u.prompt_tokens - tokens for u in usages)
    if touched:
        assert computed <= tails and all(u.cached_tokens >= tokens for u in usages)
    else:
        assert computed <= tokens + tails, "the prefix was computed once"
        assert sum(u.cached_tokens for u in usages) >= 4 * (tokens - 1)
    assert len({u.worker for u in usages}) == 1
    total = client.report()["total"]
    assert total["prompt_tokens"] - total["hit_tokens"] <= tokens + tails + 8


def test_forks_go_their_own_ways(client):
    async def tree(s: Branch):
        s += "root"
        s += gen("x", SHORT)
        a, b = s.fork(2)
        a += " and"
        b += " or"
        (c,) = a.fork(1)
        for branch in (a, b, c):
            branch += gen("y", SHORT)
        s += " trunk"
        s += gen("y", SHORT)
        await join(s, a, b, c)
        paths = [(branch.path, branch.depth) for branch in (s, a, b, c)]
        return paths, [await branch["y"] for branch in (s, a, b, c)], {await branch["x"] for branch in (s, a, b, c)}

    paths, texts, shared = run(client, tree)
    assert paths == [("", 0), ("0", 1), ("1", 1), ("0.0", 2)]
    assert texts[1] == texts[3] and len(shared) == 1
    rows = {row["depth"]: row["requests"] for row in client.report()["programs"]}
    assert rows == {0: 2, 1: 2, 2: 1}


def test_forks_of_forks_as_deep_as_one_likes(client):
    async def deep(s: Branch):
        s += "root"
        s += gen("x", SHORT)
        for _ in range(1500):
            (s,) = s.fork(1)
        s += gen("x", SHORT)
        return s.depth, await s["x"]

    assert run(client, deep)[0] == 1500


def test_a_fork_may_come_before_its_parents_work_is_done(slow):
    async def eager(s: Branch):
        s += "begin"
        s += gen("a", SHORT)
        (child,) = s.fork(1)
        child += " then"
        child += gen("b", SHORT)
        began = time.monotonic()
        await child["b"]
        return time.monotonic() - began, await child.value("b"), await s.value("a")

    seconds, b, a = run(slow, eager)
    assert seconds > 0.07 and b.usage.prompt_tokens > a.usage.prompt_tokens + 8


# ---------------------------------------------------------------- what fails


def line_of(text: str) -> int:
    lines = Path(__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line and "line_of" not in line)


def test_an_error_points_to_the_line(client):
    async def broken(s: Branch):
        s += "fine"
        s += gen("good", SHORT)
        s += gen("bad", SHORT, top_p=7.0)  # the bad line
        s += gen("later", SHORT)
        assert await s["good"]
        return await s["later"]

    with pytest.raises(ProgramError) as caught:
        run(client, broken)
    error, line = caught.value, line_of("# the bad line")
    assert error.site.line == line and str(error).startswith(f"test_programs.py:{line}: top_p must be")
    assert 'gen("bad", SHORT, top_p=7.0)' in str(error)
    assert isinstance(error.__cause__, ServerError) and error.problem.field == "top_p"


async def _text(work) -> str:
    return await work


@pytest.mark.parametrize("seen", ["", "wait", "value", "text"])
def test_an_error_in_a_branch_surfaces_unless_it_was_seen(client, seen):
    async def broken(s: Branch):
        s += "fine"
        a, b = s.fork(2)
        a += gen("x", SHORT)
        b += gen("x", SHORT, temperature=-1.0)  # the bad branch
        (below,) = b.fork(1)
        below += gen("y", SHORT)
        if seen:
            with pytest.raises(ProgramError, match="in branch 1"):
                await {"wait": below.wait, "value": lambda: below.value("y"), "text": lambda: _text(b["x"])}[seen]()
        return await a["x"]

    if seen:
        assert run(client, broken), "the program knows, and went on"
        return
    with pytest.raises(ProgramError) as caught:
        run(client, broken)
    assert caught.value.branch == "1" and caught.value.site.line == line_of("# the bad branch")
    assert "in branch 1" in str(caught.value)


def test_an_error_that_nobody_awaits_surfaces_at_the_end(client):
    async def careless(s: Branch):
        s += gen("x", SHORT)  # nothing was said before
        return 7

    with pytest.raises(ProgramError, match="prompt is empty"):
        run(client, careless)


def test_errors_of_plain_functions_point_to_the_line_too(client):
    def broken(s: SyncBranch):
        s += "fine"
        s += gen("x", SHORT, min_p=9.0)  # the plain bad line
        return s["x"]

    with pytest.raises(ProgramError) as caught:
        run(client, broken)
    assert caught.value.site.line == line_of("# the plain bad line")


def test_misuse(client):
    async def wrong(s: Branch, what: str):
        if what == "name":
            return await s["nothing"]
        if what == "kind":
            s += 7
        if what == "count":
            s.fork(0)
        if what == "stream":
            s += "x"
            s += gen("x", SHORT)
            return [piece async for piece in s.stream("x")]

    for what, error in (("name", KeyError), ("kind", TypeError), ("count", ValueError), ("stream", ValueError)):
        with pytest.raises(error):
            run(client, wrong, what)
    for bad in (lambda: user(gen("x")), lambda: select("x", []), lambda: select("x", ["a", ""])):
        with pytest.raises(ValueError):
            bad()
    with pytest.raises(TypeError):
        role("user", 3)
    with pytest.raises(TypeError, match="needs a Client"):
        program(wrong).run()


def test_roles_and_bare_text_do_not_mix(client):
    async def text_after(s: Branch):
        s += user("hi")
        s += "bare text"
        await s.wait()

    async def role_after(s: Branch):
        s += "bare text"
        s += user("hi")
        await s.wait()

    for mixed in (text_after, role_after):
        with pytest.raises(ProgramError, match="outside of"):
            run(client, mixed)


def test_gen_after_a_message_is_the_assistants(client):
    async def loose(s: Branch):
        s += user("hi")
        s += gen("a", SHORT)
        return await s["a"]

    assert run(client, loose) == client.generate([{"role": "user", "content": "hi"}], SHORT).text


# ---------------------------------------------------------------- leaving early


def test_leaving_a_program_cancels_its_branches(slow):
    endless = Sampling(max_tokens=100_000, ignore_eos=True)

    async def impatient(s: Branch):
        s += "fine"
        for branch in s.fork(3):
            branch += gen("x", endless)
        s += gen("x", endless)
        await asyncio.sleep(0.1)
        raise RuntimeError("no patience")

    with pytest.raises(RuntimeError, match="no patience"):
        run(slow, impatient)
    assert wait_until_idle(slow)["counters"]["cancelled"] == 4


def give_up(client, endless) -> None:
    """Cancel a program as soon as a request of it is in flight."""

    async def main() -> None:
        task = asyncio.create_task(program(endless)(client.aio))
        while not (await client.aio.health())["runs_in_flight"]:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    client.run(main())


def test_cancelling_a_program_cancels_its_requests(slow):
    async def endless(s: Branch):
        s += "fine"
        s += gen("x", max_tokens=100_000, ignore_eos=True)
        return await s["x"]

    give_up(slow, endless)
    assert wait_until_idle(slow)["counters"]["cancelled"] == 1


def test_a_hundred_branches_at_once(client):
    async def wide(s: Branch):
        s += "wide"
        branches = s.fork(100)
        for i, branch in enumerate(branches):
            branch += f" {i}"
            branch += gen("x", SHORT)
        return [await branch["x"] for branch in branches]

    texts = run(client, wide)
    assert len(texts) == 100 and len(set(texts)) >= 20


ENDLESS = Sampling(max_tokens=100_000, ignore_eos=True)


def test_a_branch_may_be_cancelled(slow):
    """The first of several wins: the others stop, and those who wait for them hear of it."""

    async def race(s: Branch):
        s += "start"
        winner, loser = s.fork(2)
        winner += gen("x", SHORT)
        loser += gen("x", ENDLESS)  # the loser
        (below,) = loser.fork(1)  # below the loser
        below += gen("y", SHORT)
        hopeful = asyncio.ensure_future(loser.value("x"))
        await winner["x"]
        await loser.cancel()
        problems = []
        for work in (hopeful, loser.value("x"), below.value("y"), loser.wait(), below.wait(), join(winner, below)):
            with pytest.raises(ProgramError, match="cancelled") as caught:
                await asyncio.wait_for(work, 1)
            problems.append(caught.value)
        loser += gen("z", SHORT)
        with pytest.raises(ProgramError, match="cancelled"):
            await asyncio.wait_for(loser.value("z"), 1)
        assert isinstance(problems[0].problem, asyncio.CancelledError)
        return problems[0].site.line, loser.cancelled, winner.cancelled, await winner["x"]

    line, loser, winner, text = run(slow, race)
    assert line == line_of("# the loser") and loser and not winner and text
    assert wait_until_idle(slow)["counters"]["cancelled"] == 1


def test_a_branch_may_be_cancelled_before_it_begins(slow):
    async def early(s: Branch):
        s += "start"
        s += gen("x", SHORT)
        a, b = s.fork(2)
        for branch in (a, b):
            branch += gen("y", SHORT)
        await a.cancel()
        with pytest.raises(ProgramError, match="cancelled"):
            await asyncio.wait_for(a.value("y"), 1)
        return await b["y"]

    assert run(slow, early)
    assert slow.health()["counters"]["requests"] == 2, "nothing was asked for the branch that was cancelled"


def test_what_is_forked_off_a_branch_that_was_cancelled_is_cancelled(client):
    """The program has asked for it: its end is no place to hear of it."""

    async def late(s: Branch):
        s += "start"
        a, b = s.fork(2)
        await a.cancel()
        (child,) = a.fork(1)
        (below,) = child.fork(1)
        below += gen("x", SHORT)
        b += gen("x", SHORT)
        return await b["x"], below

    text, below = run(client, late)
    assert text and below.cancelled
    assert client.health()["counters"]["requests"] == 1


@pytest.mark.parametrize("waits", ["value", "stream", "join"])
def test_a_plain_program_that_is_cancelled_ends(slow, waits):
    """Its thread may wait for whatever it likes: it gets an error and ends."""
    ended = threading.Event()

    def endless(s: SyncBranch):
        s += "fine"
        (branch,) = s.fork(1)
        branch += gen("x", ENDLESS, stream=waits == "stream")
        try:
            if waits == "value":
                branch["x"]
            elif waits == "stream":
                list(branch.stream("x"))
            else:
                s.join([branch])
        except ProgramError:
            ended.set()
            raise

    give_up(slow, endless)
    assert ended.wait(5)
    assert wait_until_idle(slow)["counters"]["cancelled"] == 1


def test_a_plain_program_may_cancel_a_branch(slow):
    def race(s: SyncBranch):
        s += "start"
        a, b = s.fork(2)
        a += gen("x", SHORT)
        b += gen("x", ENDLESS)
        text = a.wait()["x"]
        b.cancel()
        with pytest.raises(ProgramError, match="cancelled"):
            b["x"]
        return text, [branch.depth for branch in (s, a)]

    text, depths = run(slow, race)
    assert text and depths == [0, 1]
    assert wait_until_idle(slow)["counters"]["cancelled"] == 1
