"""bench.serve: its loads, its floor and its sums by hand, its client against a server that misbehaves, and all of it
at a tiny scale against fake workers."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from bench.serve.__main__ import main, parse
from bench.serve.client import Client, Run, Work, bodies, run_asks
from bench.serve.endpoint import Answer, Endpoint, RunFailed, Stream, split_url
from bench.serve.floor import Ceilings, Shape, decode_reads, floor, kv_token_bytes, prefill_flops
from bench.serve.loads import ASKED_FOR, FAN_OUT, MEASURED, OTHERS, Ask, Load, make_load, segment_ids
from bench.serve.rows import (
    WrongAnswer,
    beside,
    cached_share,
    check_counts,
    check_twice,
    percentile,
    rival_rows,
    row,
    rows,
    tpot_ms,
    ttft_ms,
)
from bench.serve.server import busy_seconds, idle_share, read_config
from tests.bench.conftest import CONFIG
from tests.frontend.conftest import serving

LLAMA_8B = Shape(layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, intermediate=14336, vocab=128256)


# ---------------------------------------------------------------- loads


def lengths(load: Load) -> Counter[tuple[int, int]]:
    """Requests by (prompt tokens, output tokens)."""
    return Counter((load.prompt_tokens(ask), ask.max_tokens) for ask in load.asks)


def test_bursts_have_their_lengths_and_counts():
    assert lengths(make_load("plain")) == {(1024, 256): 256}
    assert lengths(make_load("trunk16k")) == {(16384, 1): 1, (16512, 256): 256}
    assert lengths(make_load("trunk4k")) == {(4096, 1): 1, (4352, 256): 128}
    assert lengths(make_load("hit")) == {(16512, 1): 20}
    assert lengths(make_load("cold")) == {(16384, 1): 8}
    assert [make_load("hit").prompt_tokens(ask) for ask in make_load("hit").prepare] == [16384]
    for name in ASKED_FOR:
        assert sum(make_load(name).segments) > 1.5 * 320_000, "more than the cache that they are for holds"


def test_starts():
    assert {ask.after for ask in make_load("plain").asks} == {None}
    assert [ask.after for ask in make_load("trunk4k").asks] == [None] + [0] * 128
    for name in ("hit", "cold"):
        asks = make_load(name).asks
        assert [ask.after for ask in asks] == [None, *range(len(asks) - 1)]


def test_agents_pause_between_turns():
    """`tools` is `pressed` with pauses, but before an agent's first turn."""
    pressed, tools = make_load("pressed"), make_load("tools")
    assert pressed.segments == tools.segments
    assert [dataclasses.replace(ask, pause=0.0) for ask in tools.asks] == pressed.asks
    assert Counter((ask.after is None, ask.pause) for ask in tools.asks) == {(True, 0.0): 160, (False, 2.0): 640}


def test_tenants_are_as_many_agents_that_share_nothing():
    pressed = make_load("pressed")
    for name, agents in (("tenants", [32] * 5), ("uneven", [120, 30, 9, 1])):
        load = make_load(name)
        starts = Counter(ask.tenant for ask in load.asks if ask.after is None)
        assert starts == {f"tenant-{number}": count for number, count in enumerate(agents)}
        assert len(load.asks) == len(pressed.asks)
        assert all(ask.after is None or load.asks[ask.after].tenant == ask.tenant for ask in load.asks)
        of = {(part, ask.tenant) for ask in load.asks for part in ask.parts}
        assert len(of) == len({part for part, _ in of})


def test_sessions_grow_by_turns():
    load = make_load("sessions")
    assert len(load.asks) == 64 * 8 and {ask.max_tokens for ask in load.asks} == {96}
    assert Counter(ask.parts[0] for ask in load.asks) == {0: 22 * 8, 1: 21 * 8, 2: 21 * 8}
    firsts = [ask for ask in load.asks if ask.after is None]
    assert len(firsts) == 64 and all(6300 <= load.prompt_tokens(ask) <= 6900 for ask in firsts)
    for ask in load.asks:
        if ask.after is not None:
            before = load.asks[ask.after]
            assert ask.parts[:-2] == before.parts
            assert load.segments[ask.parts[-2]] == 96 and 300 <= load.segments[ask.parts[-1]] <= 900


def test_trees_branch():
    load = make_load("tot")
    assert lengths(load) == {(2248, 64): 8, (2448, 64): 32, (2648, 64): 128, (2848, 64): 512}
    children = Counter(ask.after for ask in load.asks)
    assert children.pop(None) == 8 and set(children.values()) == {FAN_OUT} and len(children) == 168
    for ask in load.asks:
        parent = (0,) if ask.after is None else load.asks[ask.after].parts
        assert ask.parts[:-1] == parent
    assert len({ask.parts for ask in load.asks}) == 680


def test_what_could_be_shared():
    """In percent; what servers with an unlimited prefix cache were seen to reuse, within half a point."""
    seen = {"plain": 0, "trunk16k": 98.9, "trunk4k": 93.5, "sessions": 92, "tot": 92.7, "hit": 99.2, "cold": 0}
    for name, percent in seen.items():
        assert make_load(name).shareable() * 100 == pytest.approx(percent, abs=0.5), name


def test_small_loads_keep_their_structure():
    for name in [*MEASURED, *OTHERS]:
        load = make_load(name, 0.001)
        assert all(tokens >= 2 for tokens in load.segments) and len(load.asks) >= 2
        assert all(ask.after is None or ask.after < number for number, ask in enumerate(load.asks))
    assert lengths(make_load("trunk16k", 0.001)) == {(16, 1): 1, (18, 2): 2}


def test_ids_are_seeded_in_the_vocabulary_and_of_nobody_else():
    key = {"seed": 7, "repetition": 0, "vocab_size": 128_256}
    ids = segment_ids("plain", 0, 4096, **key)
    assert (ids == segment_ids("plain", 0, 4096, **key)).all()
    assert ids.min() >= 1000 and ids.max() < 120_000 and len(set(ids.tolist())) > 3900
    others = [
        segment_ids("cold", 0, 4096, **key),
        segment_ids("plain", 1, 4096, **key),
        segment_ids("plain", 0, 4096, **key | {"repetition": 1}),
        segment_ids("plain", 0, 4096, **key | {"seed": 8}),
    ]
    assert all((ids == other).mean() < 0.01 for other in others)
    small = segment_ids("plain", 0, 4096, **key | {"vocab_size": 512})
    assert small.min() >= 256 and small.max() < 512


def test_an_ask_waits_for_the_one_before_it_and_then_for_its_pause(monkeypatch):
    """What is posted and what is slept, in order."""
    happened: list[object] = []

    class Posts:
        async def post(self, request: bytes) -> bytes:
            happened.append(request)
            return request

    async def sleep(seconds: float) -> None:
        happened.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    asks = [Ask((0,), 1), Ask((0, 1), 1, after=0, pause=2.0), Ask((0, 1, 2), 1, after=1)]
    answers = asyncio.run(run_asks(Posts(), asks, [b"a", b"b", b"c"]))
    assert answers == [b"a", b"b", b"c"] and happened == [b"a", 2.0, b"b", b"c"]


def test_bodies_join_the_ids_of_their_segments():
    load = Load("drawn")
    shared, own = load.segment(3), load.segment(2)
    load.ask((shared, own), 5)
    work = Work("http://x", "m", "drawn", 1.0, seed=1, repetition=0, vocab_size=512)
    body = json.loads(bodies(work, load, load.asks)[0])
    key = {"seed": 1, "repetition": 0, "vocab_size": 512}
    ids = [*segment_ids("drawn", shared, 3, **key).tolist(), *segment_ids("drawn", own, 2, **key).tolist()]
    assert (body["prompt"], body["max_tokens"], body["model"]) == (ids, 5, "m")
    assert body["temperature"] == 0 and body["ignore_eos"] and body["stream_options"] == {"include_usage": True}


# ---------------------------------------------------------------- the floor


TINY = Shape(layers=1, hidden=2, heads=1, kv_heads=1, head_dim=2, intermediate=3, vocab=5)
"""Q, K, V and O of 4 parameters each, three matrices of 6: 34 in the layer; 10 in the head; 4 KV elements a token."""


def fork() -> Load:
    """A prompt of 3 tokens (1 out), then two that add 2 tokens each to it and generate 3."""
    load = Load("fork")
    shared = load.segment(3)
    first = load.ask((shared,), 1)
    for _ in range(2):
        load.ask((shared, load.segment(2)), 3, after=first)
    return load


def test_a_floor_by_hand():
    assert (TINY.layer_parameters, TINY.head_parameters, kv_token_bytes(TINY, 1)) == (34, 10, 4)
    # 3 + 2 + 2 tokens; keys 1 + 2 + 3 of the shared ones, 4 + 5 of each fork; 3 requests with logits.
    flops = 2 * 34 * 7 + 4 * 2 * (6 + 9 + 9) + 2 * 10 * 3
    assert prefill_flops(fork(), TINY) == flops
    # 2 steps; each reads the 7 distinct prompt tokens, the first 1 generated token of both, the second 2.
    assert decode_reads(fork()) == (2, 2 * 7 + 2 * 1 + 2 * 2)
    least = floor(fork(), TINY, Ceilings(copy_gbs=2.0, tflops=4.0), kv_bytes=1, weight_bytes=2)
    assert least.prefill_seconds == pytest.approx(flops / 4e12)
    assert least.decode_seconds == pytest.approx((2 * 44 * 2 + 20 * 4) / 2e9)
    assert least.seconds == least.prefill_seconds + least.decode_seconds


def test_what_was_prepared_costs_nothing():
    load = fork()
    load.prepare.append(load.asks[0])
    assert prefill_flops(fork(), TINY) - prefill_flops(load, TINY) == 2 * 34 * 3 + 4 * 2 * 6


def test_steps_follow_the_longest_chain():
    assert decode_reads(make_load("sessions"))[0] == 8 * 95
    assert decode_reads(make_load("tot"))[0] == 4 * 63
    assert decode_reads(make_load("cold")) == (0, 0)


def test_overlapping_asks_share_a_read():
    load = Load("overlap")
    shared = load.segment(10)
    load.ask((shared,), 5)
    load.ask((shared,), 3)
    assert decode_reads(load) == (4, 4 * 10 + (1 + 2 + 3 + 4) + (1 + 2))


def test_the_floor_of_a_known_model():
    """16,384 cold tokens of an 8B model are about 300 TFLOP; its weights are 15 GB."""
    assert prefill_flops(make_load("cold"), LLAMA_8B) / 8 == pytest.approx(299e12, rel=0.01)
    assert 2 * (LLAMA_8B.layer_parameters + LLAMA_8B.head_parameters) == pytest.approx(15.0e9, rel=0.01)


def test_the_floor_of_experts():
    """A token is multiplied by those it chose; a step reads those that somebody did."""
    dense = Shape(layers=2, hidden=4, heads=2, kv_heads=1, head_dim=2, intermediate=3, vocab=5)
    mixed = dataclasses.replace(dense, experts=4, chosen=2)
    assert mixed.expert_parameters == 2 * 4 * 3 * 3
    assert mixed.layer_parameters == dense.layer_parameters + mixed.expert_parameters
    others = dense.layer_parameters - dense.expert_parameters + 4 * 5
    assert dense.parameters_read(7) == others + 72
    assert [mixed.parameters_read(n) for n in (1, 2)] == [others + 2 * 72, others + 3 * 72]
    config = {"num_hidden_layers": 2, "hidden_size": 4, "num_attention_heads": 2, "num_key_value_heads": 1}
    config |= {"intermediate_size": 9, "moe_intermediate_size": 3, "num_experts": 4, "num_experts_per_tok": 2}
    assert Shape.of(config | {"vocab_size": 5}) == mixed


def test_shapes_come_from_config_json(folder, tmp_path):
    expected = Shape(layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, intermediate=128, vocab=512)
    assert Shape.of(read_config(str(folder))) == expected
    (tmp_path / "config.json").write_text(json.dumps({"text_config": CONFIG | {"head_dim": 32}}))
    assert Shape.of(read_config(str(tmp_path / "config.json"))).head_dim == 32
    for other in ({"kv_lora_rank": 512}, {"layer_types": ["full_attention", "sliding_attention"]}):
        with pytest.raises(ValueError, match="no floor is known"):
            Shape.of(CONFIG | other)


# ---------------------------------------------------------------- sums and checks


def answer(**changes) -> Answer:
    fields = {"sent": 1.0, "first": 1.25, "last": 2.0, "chunks": 2, "digest": "x"}
    return Answer(**fields | {"prompt_tokens": 4, "completion_tokens": 4, "cached_tokens": 3} | changes)


def test_percentiles():
    assert [percentile([3.0, 1.0, 2.0], p) for p in (0, 50, 75, 100)] == [1.0, 2.0, 2.5, 3.0]
    assert percentile([5.0], 99) == 5.0
    assert percentile([], 50) is None


def test_a_row_by_hand():
    load = Load("two")
    load.ask((load.segment(4),), 4)
    load.ask((load.segment(6),), 1)
    assert (ttft_ms(answer()), tpot_ms(answer())) == (250.0, 250.0)
    one = answer(first=1.75, last=1.75, prompt_tokens=6, completion_tokens=1, cached_tokens=2)
    found = row(load, Run(2.0, 0.5, 0.125, [answer(), one]))
    assert (found["out_tok_s"], found["req_s"], found["wall_s"], found["client_cpu"]) == (2.5, 1.0, 2.0, 0.25)
    assert (found["ttft_p50_ms"], found["tpot_p50_ms"], found["tpot_p99_ms"]) == (500.0, 250.0, 250.0)
    assert (found["chunks"], found["cached"], found["could"], found["gpu_idle"]) == (0.8, 0.5, 0.0, 0.125)
    assert cached_share([answer(), answer(cached_tokens=None)]) is None


def test_tenants_have_rows_of_their_own():
    load = Load("two")
    load.ask((load.segment(4),), 4, tenant="a")
    load.ask((load.segment(6),), 1, tenant="b")
    one = answer(first=1.75, last=1.75, prompt_tokens=6, completion_tokens=1, cached_tokens=0)
    found = rows(load, Run(2.0, 0.5, 0.125, [answer(), one]))
    assert [row["load"] for row in found] == ["two", "two, a", "two, b"]
    assert [row["out_tok_s"] for row in found] == [2.5, 2.0, 0.5]
    assert [row["cached"] for row in found] == [0.3, 0.75, 0.0]
    assert [row["ttft_p50_ms"] for row in found] == [500.0, 250.0, 750.0]


@pytest.mark.parametrize("changes", [{"prompt_tokens": 5}, {"completion_tokens": 3}, {"cached_tokens": 5}])
def test_wrong_counts_are_refused(changes):
    load = Load("one")
    load.ask((load.segment(4),), 4)
    check_counts(load, [answer()])
    with pytest.raises(WrongAnswer, match="one, request 0"):
        check_counts(load, [answer(**changes)])


def test_the_same_prompt_must_be_answered_alike_and_from_the_cache():
    check_twice([answer(cached_tokens=0), answer()])
    check_twice([answer(cached_tokens=None), answer(cached_tokens=None)])
    check_twice([answer(digest="y"), answer()], same_text=False)
    with pytest.raises(WrongAnswer, match="another text"):
        check_twice([answer(digest="y"), answer()])
    with pytest.raises(WrongAnswer, match="no token"):
        check_twice([answer(), answer(cached_tokens=0)])


def test_rivals_stand_beside_their_load():
    rivals = rival_rows({"server": "r", "rows": [{"load": "a", "out_tok_s": 5}, {"load": "z"}]})
    rows = [{"server": "us", "load": name, "out_tok_s": 7.0, "gpu_idle": None} for name in "ab"]
    assert beside(rows, rivals) == [
        {"load": "a", "server": "us", "out_tok_s": 7.0},
        {"load": "a", "server": "r", "out_tok_s": 5},
        {"load": "b", "server": "us", "out_tok_s": 7.0},
    ]
    with pytest.raises(ValueError, match="a load and a server"):
        rival_rows([{"load": "a"}])


def test_idle_shares():
    assert idle_share([1.0, 2.0], [2.0, 2.0], 4.0) == 0.875
    assert idle_share(None, [1.0], 4.0) is None


# ---------------------------------------------------------------- the client


def test_streams_are_read_however_they_are_cut():
    events = (
        b": comment\n\n"
        b'data: {"choices":[{"text":""}],"usage":null}\r\n\r\n'
        b'data: {"choices":[{"text":"\xc3\xa9"}]}\n\n'
        b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2,'
        b'"prompt_tokens_details":{"cached_tokens":1}}}\n\ndata: [DONE]\n\n'
    )
    found = []
    for size in (1, 7, len(events)):
        stream = Stream()
        for number, begin in enumerate(range(0, len(events), size)):
            stream.feed(events[begin : begin + size], float(number + 1))
        found.append(stream.answer(0.5))
    assert len({(a.prompt_tokens, a.completion_tokens, a.cached_tokens, a.digest) for a in found}) == 1
    assert (found[0].prompt_tokens, found[0].completion_tokens, found[0].cached_tokens) == (3, 2, 1)
    assert found[0].chunks == 2
    first = events.index(b"\n", events.index(b"data")) + 1
    assert (found[0].sent, found[0].first, found[2].first) == (0.5, first, 1.0)
    with pytest.raises(RunFailed, match="usage"):
        Stream().answer(0.0)


def test_the_key_of_a_request_is_in_its_head():
    endpoint = Endpoint("http://h:81")
    plain, keyed = endpoint.request(b"{}", ""), endpoint.request(b"{}", "k")
    assert b"authorization" not in plain and plain.endswith(b"content-length: 2\r\n\r\n{}")
    assert keyed == plain.replace(b"content-length", b"authorization: Bearer k\r\ncontent-length")


def test_urls():
    assert split_url("http://h:81/v1/") == split_url("http://h:81") == ("h", 81, "")
    assert split_url("http://h/proxy/v1") == ("h", 80, "/proxy")
    for wrong in ("https://h", "h:80", ""):
        with pytest.raises(ValueError, match="url"):
            split_url(wrong)


@contextmanager
def canned(payload: bytes) -> Iterator[str]:
    """The URL of a server that says 404 to GET, and sends `payload` to POST and hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    get = connection.recv(1 << 16).startswith(b"GET")
                    connection.sendall(b"HTTP/1.1 404 x\r\ncontent-length: 0\r\n\r\n" if get else payload)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    "payload, reason",
    [
        (b"HTTP/1.1 400 Bad\r\ncontent-length: 5\r\n\r\nwrong", "status 400: wrong"),
        (b'HTTP/1.1 200 OK\r\ncontent-length: 24\r\n\r\ndata: {"error": "gone"}\n\n', "gone"),
        (CHUNKED + b"2\r\n\n\n\r\n0\r\n\r\n", "without a choice"),
        (CHUNKED + b"9\r\ndata: ", "closed the connection"),
        (CHUNKED + b"zz\r\n", "invalid literal"),
        (b"HTTP/1.1 200 OK\r\n\r\n", "without a length"),
    ],
)
def test_a_server_that_fails_ends_the_load(payload, reason):
    with canned(payload) as url, Client() as client:
        for _ in range(2):
            with pytest.raises(RunFailed, match=reason):
                client.run(Work(url, "m", "twice", 1.0, 0, 0, 512))


def test_a_connection_that_the_server_closed_meanwhile_is_replaced():
    """It answers one request a connection, and hangs up when the next one comes."""
    events = b'data: {"choices":[{"text":"x"}],"usage":{"prompt_tokens":1,"completion_tokens":1}}\n\n'
    reply = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(events), events)
    seen, tasks = [], []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.append(asyncio.current_task())
        seen.append(await reader.readuntil(b"{}"))
        writer.write(reply)
        with suppress(asyncio.IncompleteReadError):
            await reader.readuntil(b"{}")
        writer.close()
        await writer.wait_closed()

    async def run() -> list[Answer]:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        endpoint = Endpoint(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        answers = [await endpoint.post(endpoint.request(b"{}", "")) for _ in range(3)]
        endpoint.close()
        await asyncio.gather(*tasks)
        server.close()
        return answers

    assert [one.completion_tokens for one in asyncio.run(run())] == [1, 1, 1] and len(seen) == 3


# ---------------------------------------------------------------- all of it


def test_all_loads_against_fake_workers(folder, tmp_path, capfd):
    rivals, out = tmp_path / "rivals.json", tmp_path / "out.json"
    rivals.write_text(json.dumps([{"server": "rival", "load": "tot", "out_tok_s": 1234.0}]))
    with serving(folder, fake="0,0.0005", workers=1) as frontend:
        flags = ["--url", frontend.url, "--scale", "0.02", "--seed", "5", "--shape", str(folder)]
        flags += ["--out", str(out), "--copy-gbs", "100", "--tflops", "1", "--rivals", str(rivals)]
        assert main(flags) == 0
        assert len(busy_seconds(frontend.url, "")) == 1
    content = json.loads(out.read_text())
    rows = {one["load"]: one for one in content["rows"]}
    assert list(rows) == list(MEASURED) and content["start_s"] is None and content["scale"] == 0.02
    for name, one in rows.items():
        assert 0 < one["gpu_idle"] < 1, name
        # One page a token and one worker: it may reuse all that can be, but for what two computed at once.
        assert one["cached"] == pytest.approx(one["could"], abs=0.1), name
        assert 0 < one["ttft_p50_ms"] <= one["ttft_p99_ms"] and one["times_floor"] > 1
        assert one["wall_s"] * one["req_s"] == pytest.approx(len(make_load(name, 0.02).asks))
        assert (one["tpot_p50_ms"] is None) == (name in ("hit", "cold"))
    printed = capfd.readouterr().out.splitlines()
    assert [line.split()[:2] for line in printed[6:8]] == [["tot", "radixrt"], ["tot", "rival"]]


def test_a_repetition_finds_nothing_of_the_one_before(folder, tmp_path):
    out = tmp_path / "out.json"
    with serving(folder, workers=1) as frontend:
        flags = [
            "--url",
            frontend.url,
            "--scale",
            "0.01",
            "--seed",
            "5",
            "--shape",
            str(folder),
            "--loads",
            "plain,cold",
        ]
        assert main([*flags, "--repeat", "2", "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [one["load"] for one in rows] == ["plain", "plain", "cold", "cold"]
    assert all(one["cached"] < 0.1 and "floor_s" not in one for one in rows)


def test_it_serves_a_model_itself(folder, tmp_path, capfd):
    out = tmp_path / "out.json"
    flags = ["--serve", str(folder), "--loads", "hit", "--scale", "0.01", "--out", str(out), "--"]
    assert main([*flags, "--fake", "0,0"]) == 0
    assert json.loads(out.read_text())["start_s"] > 0
    assert "healthy after" in capfd.readouterr().out
    assert main([*flags, "--workers", "none"]) == 1


def test_it_needs_nothing_of_the_server():
    """It measures others where radixrt is not installed."""
    code = "import sys, bench.serve.__main__; sys.exit(bool({'radixrt', 'zmq', 'torch'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_the_command_line():
    args, flags = parse(["--serve", "M", "--loads", "hit", "--", "--page-size", "16"])
    assert (args.shape, args.loads, flags, args.out) == ("M", ["hit"], ["--page-size", "16"], None)
    assert parse(["--url", "u"])[0].out.name == "serve.json"
    for wrong in ([], ["--url", "u", "--loads", "x"], ["--url", "u", "--", "--x"]):
        with pytest.raises(SystemExit):
            parse(wrong)
    with pytest.raises(SystemExit):
        parse(["--url", "u", "--copy-gbs", "1", "--tflops", "1"])
