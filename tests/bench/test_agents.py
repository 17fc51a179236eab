"""bench.agents: sessions as they are recorded and replayed, its sums by hand, and all of it against fake workers."""

from __future__ import annotations

import asyncio
import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.agents.__main__ import main, parse
from bench.agents.client import Agents, Request, Run, Start, Work, start_at
from bench.agents.prompts import InfiniteCache, Writer, encoded, size
from bench.agents.rows import details, failure, generated_within, holds, most_agents, row
from bench.agents.sessions import BlockPrompt, Session, TextPrompt, Turn, read_sessions
from bench.serve.endpoint import Answer, RunFailed, clock
from tests.frontend.conftest import serving


def request(tokens: int, *runs: tuple[int, int], out: int = 3, **more) -> dict:
    return {"type": "n", "in": tokens, "out": out, "hash_runs": [list(run) for run in runs]} | more


def recorded(id: str, *requests: dict) -> dict:
    return {"id": id, "tool_tokens": 64, "system_tokens": 70, "requests": list(requests)}


AGENT = {"type": "subagent", "requests": [request(200, (1, 2), (90, 1)), request(260, (1, 2), (90, 2))]}
FIRST = recorded(
    "a",
    request(330, (1, 5), api_time=4.0),
    AGENT,
    request(520, (1, 4), (6, 4), think_time=7.0, api_time=2.0),
    request(530, (1, 4), (6, 4), out=0),
    request(700, (1, 4), (6, 6), think_time=500.0, api_time=9.0),
    request(9_000, (1, 140)),
)
OTHER = recorded("b", request(320, (1, 5)), request(384, (1, 6), think_time=0.01))


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """A folder with traces as they are published."""
    folder = tmp_path_factory.mktemp("data")
    calls = [
        {"timestamp": 1_000_000, "input": "You fix it.", "output": "I look at it.", "session_id": "x"},
        {"timestamp": 1_500_000, "input": "", "output": "nothing was asked", "session_id": "x"},
        {"timestamp": 3_000_000, "input": "You fix it. I look at it. Good.", "output": "Done", "session_id": "x"},
        {"timestamp": 99_000_000, "input": "You fix it. Or not.", "output": "No", "session_id": "x"},
    ]
    lines = {"kv_cache_tester/sessions": [FIRST, OTHER], "lmcache_agent_trace/miniswe": calls}
    for name, values in lines.items():
        path = folder / f"{name}.jsonl.gz"
        path.parent.mkdir()
        with gzip.open(path, "wt") as file:
            file.write("".join(json.dumps(value) + "\n" for value in values))
    return folder


# ---------------------------------------------------------------- sessions


def test_turns_are_as_recorded_with_short_pauses_and_subagents_after_the_turn_before(data):
    first, other = read_sessions("kv_cache_tester", data, 10_000)
    assert (first.name, other.name) == ("a", "b")
    assert [(turn.tokens, turn.max_tokens, turn.pause, turn.lasted) for turn in first.turns] == [
        (330, 3, 0.0, 4.0),
        (520, 3, 7.0, 2.0),
        (700, 3, 60.0, 9.0),
        (9_000, 3, 0.0, 0.0),
    ]
    (agent,), *rest = [turn.agents for turn in first.turns]
    assert [turn.tokens for turn in agent] == [200, 260] and rest == [(), (), ()]


def test_longer_sessions_are_left_out_or_end_before(data):
    assert [session.name for session in read_sessions("kv_cache_tester", data, 9_002)] == ["b"]
    first, _ = read_sessions("kv_cache_tester", data, 9_002, cut=True)
    assert [turn.tokens for turn in first.turns] == [330, 520, 700]
    assert [turn.tokens for turn in read_sessions("kv_cache_tester", data, 523, cut=True)[0].turns] == [330, 520]
    with pytest.raises(ValueError, match="at most 100"):
        read_sessions("kv_cache_tester", data, 100, cut=True)


def test_texts_are_sent_not_before_their_recorded_interval(data):
    (session,) = read_sessions("miniswe", data, 1_000)
    assert [turn.prompt.text[:12] for turn in session.turns] == ["You fix it.", "You fix it. ", "You fix it. "]
    assert [(turn.interval, turn.max_tokens) for turn in session.turns] == [(0.0, 3), (2.0, 1), (60.0, 1)]


def test_a_session_begins_at_a_share_of_its_time_with_pauses_as_they_will_be(data):
    first = read_sessions("kv_cache_tester", data, 10_000)[0]  # at 0, 11, 73 and 82 seconds
    assert [start_at(first, at) for at in (0.0, 0.1, 0.5, 1.0)] == [
        Start(0, 0.0),
        Start(1, pytest.approx(11 - 8.2)),
        Start(2, pytest.approx(73 - 41)),
        Start(3, 0.0),
    ]


# ---------------------------------------------------------------- prompts


def ids(prompt: BlockPrompt, play: int = 0, salt: int = 7) -> list[int]:
    return json.loads(encoded(Writer(prompt.session, play, salt, 512).pieces(prompt)))


def test_prompts_share_what_was_recorded_and_other_plays_the_system_prompt_only(data):
    first, other = read_sessions("kv_cache_tester", data, 10_000)
    one, two, far, _ = (turn.prompt for turn in first.turns)
    assert [len(ids(prompt)) for prompt in (one, two, far)] == [330, 520, 700]
    assert ids(one)[:256] == ids(two)[:256] and ids(one)[256:320] != ids(two)[256:320]
    assert ids(two)[:512] == ids(far)[:512] and ids(two)[512:] != ids(far)[512:520]
    for theirs in (ids(one, play=1), ids(other.turns[0].prompt)):
        assert theirs[:128] == ids(one)[:128] and theirs[128:192] != ids(one)[128:192]
    assert ids(one, salt=8)[:64] != ids(one)[:64]
    assert all(256 <= number < 512 for number in ids(far))


def test_texts_are_marked_by_run_and_play():
    writer = Writer("x", 3, 17, 512)
    assert json.loads(encoded(writer.pieces(TextPrompt('say "é"' * 40)))) == "[17 3]\n" + 'say "é"' * 40


PIECES = st.lists(st.sampled_from([b"1,2", b"1,3", b"4"]), min_size=1, max_size=5)
TEXTS = st.text("ab", min_size=1, max_size=7).map(lambda text: [text[n : n + 2] for n in range(0, len(text), 2)])


@given(st.lists(PIECES, max_size=8), st.lists(TEXTS, max_size=8))
def test_the_infinite_cache_has_the_longest_common_beginning(tokens, texts):
    def common(one: list, other: list) -> int:
        pairs = zip(one, other, strict=False)
        return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))

    cache = InfiniteCache()
    for number, prompt in enumerate(tokens):
        shared = max((common(prompt, before) for before in tokens[:number]), default=0)
        assert cache.add(prompt) == sum(map(size, prompt[:shared]))
    cache, whole = InfiniteCache(), ["".join(text) for text in texts]
    for number, text in enumerate(texts):
        assert cache.add(text) == max((common(whole[number], before) for before in whole[:number]), default=0)


# ---------------------------------------------------------------- the loop


class Server:
    """Answers each request after `seconds`; notes (when, prompt tokens, max_tokens) and those that were cancelled."""

    def __init__(self, seconds: float = 0.0, refuses: str = "") -> None:
        self.seconds, self.refuses = seconds, refuses
        self.seen: list[tuple[float, int, int]] = []
        self.cancelled = 0

    def request(self, body: bytes, _key: str) -> bytes:
        return body

    async def post(self, body: bytes) -> Answer:
        fields = json.loads(body)
        assert fields["ignore_eos"] and fields["stream"] and fields["stream_options"]["include_usage"]
        sent, tokens = clock(), len(fields["prompt"])
        self.seen.append((sent, tokens, fields["max_tokens"]))
        try:
            await asyncio.sleep(self.seconds)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.refuses:
            raise RunFailed(self.refuses)
        return Answer(sent, clock(), clock(), 1, tokens, fields["max_tokens"], 0, "")


def replayed(server: Server, *sessions: Session, agents: int = 1, seconds: float = 0.3, **more) -> Run:
    settings = {"grace": 0.0, "seed": 1, "salt": 1, "vocab_size": 512, "longest": 1, "cut": False, "start": (0.0, 0.0)}
    work = Work(
        url="http://127.0.0.1:9", model="m", traces="", data="", agents=agents, seconds=seconds, **settings | more
    )

    async def run() -> Run:
        replay = Agents(work, list(sessions), server)
        replay._busy_seconds = no_busy_seconds
        return await replay.run()

    return asyncio.run(run())


async def no_busy_seconds() -> None:
    return None


def turn(tokens: int, **more) -> Turn:
    return Turn(BlockPrompt("s", "sys", 0, (), tokens, tokens), 2, tokens, **more)


def test_a_turn_waits_for_the_answer_before_its_pause_and_its_subagents():
    agent = turn(10), turn(11)
    server = Server(0.05)
    run = replayed(
        server, Session("s", (turn(1, agents=(agent,)), turn(2, pause=0.02), turn(3, interval=0.2))), seconds=0.6
    )
    times = {tokens: at - server.seen[0][0] for at, tokens, _ in server.seen[:5]}
    assert list(times) == [1, 10, 11, 2, 3], "the subagent is beside its session"
    assert 0.1 < times[11] < 0.14 and 0.15 < times[2] < 0.2 and 0.35 < times[3] < 0.4
    assert [one.continues for one in run.requests[:5]] == [False, False, True, True, True]
    assert server.seen[5][1] == 1 and run.sessions > 1, "then the next session begins, from its first turn"


def test_agents_begin_in_the_middle_after_a_warm_up():
    session = Session("s", tuple(turn(n, pause=0.4) for n in range(1, 12)))
    server = Server()
    run = replayed(server, session, agents=3, start=(0.25, 0.75), seconds=0.41)
    warm, rest = server.seen[:3], server.seen[3:]
    assert all(most == 1 and 2 <= tokens <= 8 for _, tokens, most in warm)
    assert sorted(tokens + 1 for _, tokens, _ in warm) == sorted(tokens for _, tokens, _ in rest[:3])
    assert all(one.continues and one.max_tokens == 2 for one in run.requests) and len(run.requests) == len(rest)
    assert len({at for at, _, _ in rest}) == len(rest) and rest[2][0] - rest[0][0] > 0.01, "not all at once"
    again = Server()
    replayed(again, session, agents=3, start=(0.25, 0.75), seconds=0.41)
    assert [seen[1:] for seen in again.seen[:3]] == [seen[1:] for seen in warm], "the seed says where"


def test_a_window_ends_with_what_is_in_flight():
    session = Session("s", tuple(turn(n) for n in range(1, 9)))
    server = Server(0.1)
    run = replayed(server, session, seconds=0.05, grace=0.2)
    assert [one.answer is not None for one in run.requests] == [True] and len(server.seen) == 1
    server = Server(0.5)
    run = replayed(server, session, seconds=0.05)
    assert [(one.answer, one.error) for one in run.requests] == [(None, "")] and server.cancelled == 1
    assert row(1, run)["unfinished"] == 1


def test_failures_are_counted_and_do_not_flood_the_server():
    server = Server(refuses="status 429: too many")
    run = replayed(server, Session("s", (turn(1), turn(2))), agents=2)
    assert len(run.requests) == 2 and details(run)["errors_by_kind"] == {"status 429": 2}
    assert details(run)["first_errors"] == {"status 429": "status 429: too many"} and not details(run)["valid"]
    slow = replayed(Server(1.0), Session("s", (turn(1),)), timeout=0.05)
    assert details(slow)["errors_by_kind"] == {"timeout": 1}
    with pytest.raises(RunFailed, match="2 of 2 requests of the warm-up failed, the first with status 429"):
        replayed(server, Session("s", (turn(1), turn(2, pause=1.0))), agents=2, start=(0.5, 0.6))


# ---------------------------------------------------------------- sums


def answered(first: float, last: float, tokens: int = 11, known: int = 900, **more) -> Request:
    fields = {"cached_tokens": 500, "prompt_tokens": 1000, "completion_tokens": tokens} | more
    return Request(1000, known, 11, True, True, Answer(sent=0.0, first=first, last=last, chunks=1, digest="", **fields))


def test_the_row_of_a_run():
    run = Run(seconds=10.0, began=0.0, requests=[answered(1.0, 2.0), answered(2.0, 4.0), answered(9.0, 19.0)])
    assert row(5, run) == pytest.approx(
        {
            "agents": 5,
            "req_s": 0.2,
            "out_tok_s": (11 + 11 + 1.1) / 10,
            "ttft_p50_s": 2.0,
            "ttft_p90_s": 7.6,
            "ttft_p99_s": 8.86,
            "cont_p50_s": 2.0,
            "cont_p90_s": 7.6,
            "cont_p99_s": 8.86,
            "tpot_p50_ms": 200.0,
            "tpot_p90_ms": 840.0,
            "p90_tok_s": 1e3 / 840,
            "cached": 0.5,
            "infinite": 0.9,
            "of_infinite": 5 / 9,
            "errors": 0,
            "unfinished": 0,
            "gpu_idle": None,
        }
    )
    assert row(1, Run(seconds=1.0))["cached"] is None
    assert row(1, Run(1.0, requests=[answered(1.0, 2.0, cached_tokens=None)]))["of_infinite"] is None


def test_only_short_continuations_stand_apart():
    first = answered(5.0, 6.0)
    first.continues = False
    far = answered(7.0, 8.0, known=10, prompt_tokens=1000)
    far.size, far.answer.prompt_tokens = 5000, 5000
    found = row(1, Run(10.0, requests=[answered(1.0, 2.0), first, far]))
    assert found["cont_p99_s"] == 1.0 and found["ttft_p50_s"] == 5.0
    assert details(Run(10.0, requests=[first]))["continuations"] == 0


def test_answers_and_prompts_of_another_length_are_failures():
    assert not failure(answered(1.0, 2.0))
    assert failure(answered(1.0, 2.0, tokens=4)) == "answer of another length: 4 tokens instead of 11"
    assert failure(answered(1.0, 2.0, prompt_tokens=1001)) == "prompt of another length: 1001 tokens instead of 1000"
    text = answered(1.0, 2.0, prompt_tokens=250)
    text.in_tokens = False
    assert not failure(text)


def test_tokens_within_a_window():
    answer = answered(2.0, 4.0, tokens=10).answer
    assert [generated_within(answer, *window) for window in [(0, 9), (3, 9), (0, 2.5), (5, 9)]] == [10, 5, 2.5, 0]


def test_an_objective_holds_by_speed_first_token_and_errors():
    good = {"valid": True, "tpot_p90_ms": 25.0, "ttft_p90_s": 2.0}
    assert holds(good, 40, 2)
    for change in ({"valid": False}, {"tpot_p90_ms": 25.1}, {"tpot_p90_ms": None}, {"ttft_p90_s": 2.1}):
        assert not holds(good | change, 40, 2)


@given(st.integers(0, 70), st.integers(1, 64), st.integers(1, 64))
def test_the_search_finds_the_most_agents_and_tries_few(true_most, first, most):
    tried = []

    def holds(number: int) -> bool:
        tried.append(number)
        return number <= true_most

    assert most_agents(holds, first, most) == min(true_most, most)
    assert len(set(tried)) == len(tried) <= 13 and all(1 <= number <= most for number in tried)


# ---------------------------------------------------------------- all of it


def test_agents_against_fake_workers(folder, data, tmp_path, capfd):
    out = tmp_path / "out.json"
    with serving(folder, fake="0,0.002", workers=1, context=600) as frontend:
        flags = [frontend.url, "--data", str(data), "--vocab-size", "512", "--out", str(out), "--grace", "1"]
        assert main([*flags, "--agents", "3", "--duration", "0.7", "--cut", "--start", "0", "0.2"]) == 0
        (one,) = json.loads(out.read_text())["rows"]
        texts = ["--traces", "miniswe", "--slo", "1", "--most", "2", "--agents", "1", "--duration", "0.3"]
        assert main([*flags, *texts, "--start", "0", "0"]) == 0
        content = json.loads(out.read_text())
        refused = ["--max-context-length", "20000", "--start", "0.9", "1", "--agents", "2", "--duration", "0.1"]
        assert main([*flags, *refused]) == 1
    assert one["requests"] > 3 and one["valid"] and one["errors_by_kind"] == {} and one["agents"] == 3
    # One page a token and one worker: it has all that was sent, but for what two compute at once.
    assert one["cached"] == pytest.approx(one["infinite"], abs=0.1) and 0.3 < one["infinite"] < 1
    assert 0 < one["ttft_p50_s"] < 1 and one["tpot_p90_ms"] >= 0 and 0 < one["gpu_idle"] < 1
    assert content["most_agents"] == 2 and [row["holds"] for row in content["rows"]] == [True, True]
    assert all(row["errors"] == 0 for row in content["rows"])
    printed = capfd.readouterr()
    assert "most agents with 1 tokens/s each and 2 s to the first: 2" in printed.out
    assert "requests of the warm-up failed, the first with status 400" in printed.err


def test_it_needs_nothing_of_the_server():
    """It measures others where radixrt is not installed."""
    code = "import sys, bench.agents.__main__; sys.exit(bool({'radixrt', 'zmq', 'torch'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_the_command_line():
    args = parse(["u", "--start", "0.1", "0.2"])
    assert (args.url, args.agents, args.seed, args.slo, args.start) == ("u", 8, 42, None, [0.1, 0.2])
    assert parse(["u"]).start == (0.25, 0.75) and parse(["u", "--salt", "3"]).salt == 3
    for wrong in ([], ["u", "--start", "1", "0"], ["u", "--start", "0", "2"], ["u", "--agents", "0"]):
        with pytest.raises(SystemExit):
            parse(wrong)


def test_recorded_sessions_are_read(shared_data):
    sessions = read_sessions("kv_cache_tester", shared_data, 130_000)
    assert len(sessions) > 100 and sum(len(turn.agents) for session in sessions for turn in session.turns) > 0
    assert max(turn.pause for session in sessions for turn in session.turns) == 60.0
    texts = read_sessions("lmcache_agent_trace", shared_data, 130_000)
    assert {session.name.split("/")[0] for session in texts} == {"miniswe", "magagent", "taubench"}
