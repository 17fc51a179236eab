"""What is known of a message before it is decoded, and which are."""

from __future__ import annotations

import time
from array import array

import msgspec
import pytest
from sim_workers import continuation, ids
from stack import Client, stack

from radixrt import wire
from radixrt.messages import (
    Ask,
    CalledTool,
    Cancel,
    ChatPrompt,
    ClearCache,
    Error,
    Generate,
    Sampling,
    Tokenize,
    TokenPrompt,
)
from radixrt.router.server import gate, loop
from radixrt.router.server.gate import MIN_BYTES, Gate
from radixrt.wire.heads import DEPTH, ENTRIES, FINE, MALFORMED, NUMBERS, VALUES, read_head
from tests.waiting import eventually

PROMPT = TokenPrompt(ids(5, 6, 7))
EMPTY_OBJECTS = (
    b"\x84\xa4type\xa8generate\xa2id\x07\xa7api_key\xa5wrong\xa6prompt\x82\xa4type\xa4chat\xa8messages\xdd"
    + (16_000_000).to_bytes(4, "big")
    + b"\x80" * 16_000_000
)
"""16 MB, which make 16 million objects."""


def head(message, values=100, numbers=100, entries=100, depth=100):
    return read_head(message if isinstance(message, bytes) else wire.encode(message), values, numbers, entries, depth)


@pytest.mark.parametrize(
    "id", [0, 127, 128, 255, 256, 1 << 16, (1 << 32) - 1, 1 << 32, (1 << 64) - 1, -1, -32, -33, -129, -(1 << 63)]
)
def test_a_head_has_id_type_and_key(id):
    found = head({"type": "generate", "x": [1, {"id": 5, "api_key": "no"}], "id": id, "api_key": "k" * 300})
    assert found[:4] == (FINE, id, b"generate", b"k" * 300)


def test_fields_of_other_types_do_not_count():
    assert head({"type": 3, "id": "7", "api_key": b"k"})[:4] == (FINE, None, b"", b"")
    twice = b"\x82\xa7api_key\xa1a\xa7api_key\xa1b"
    assert head(twice).key == b"b" == msgspec.msgpack.decode(twice)["api_key"].encode(), "as the decoder takes it"


def test_all_that_msgpack_has_is_read():
    values = [None, True, 1.5, -1, 300, 1 << 40, "é" * 40, "x" * 70_000, b"b" * 300, b"b" * 70_000, [1] * 20, [], {}]
    values += [{str(n): n for n in range(20)}, {5: {None: 1}}, *(msgspec.msgpack.Ext(3, b"e" * n) for n in range(20))]
    values += [msgspec.msgpack.Ext(3, b"e" * 70_000), b"\xca\0\0\0\0", [1] * 70_000]
    message = msgspec.msgpack.encode({"values": values, "id": 4})
    assert read_head(message, 1 << 20, 1 << 20, 1 << 20, 9)[:2] == (FINE, 4)
    for cut in (1, 2, 5, 9, len(message) // 2, len(message) - 1):
        assert head(message[:-cut], 1 << 20, 1 << 20, 1 << 20).verdict == MALFORMED
    assert head(message + b"\0", 1 << 20, 1 << 20, 1 << 20).verdict == MALFORMED


@pytest.mark.parametrize(
    "payload", [b"", b"\xc1", b"\x91\x01", b"\xa1x", b"\x81\xa1x", b"\xdf\xff\xff\xff\xff", b"\x00"]
)
def test_what_is_not_one_map_is_malformed(payload):
    assert head(payload).verdict == MALFORMED
    large = payload + b"\xc1" * MIN_BYTES
    assert (Gate(()).refusal(large).code, Gate("k").refusal(payload).code) == (400, 400)
    assert Gate(()).refusal(payload) is None, "it is decoded, and refused by that"


@pytest.mark.parametrize(
    ("limits", "verdict"),
    [
        ({"values": 14}, FINE),
        ({"values": 13}, VALUES),
        ({"numbers": 3}, FINE),
        ({"numbers": 2}, NUMBERS),
        ({"entries": 2}, FINE),
        ({"entries": 1}, ENTRIES),
        ({"depth": 5}, FINE),
        ({"depth": 4}, DEPTH),
    ],
)
def test_what_a_message_holds_is_counted(limits, verdict):
    found = head({"type": "x", "prompt": {"tools": [], "messages": ["a", b"b", 3, {"c": [4]}, None, []]}}, **limits)
    assert found.verdict == verdict and found.path == ("" if verdict == FINE else "prompt.messages")


def test_the_path_has_names_only():
    assert head({"a b": [1] * 9}, numbers=5).path == "" == head({b"\xff": [1] * 9}, numbers=5).path
    assert head([1] * 9, numbers=5).verdict == MALFORMED
    assert head({"prompt": {"a\n": [1] * 9}}, numbers=5).path == ""


def test_with_keys_others_are_not_decoded():
    keys = Gate(["key", "admin"])
    for message in (Generate(id=7, prompt=PROMPT), Tokenize(id=7, prompt=PROMPT, api_key="ke"), ClearCache(id=7)):
        refused = keys.refusal(wire.encode(message))
        assert (refused.id, refused.code, refused.field) == (7, 401, "api_key")
        message.api_key = "admin"
        assert keys.refusal(wire.encode(message)) is None is Gate(()).refusal(wire.encode(message))
    assert keys.refusal(wire.encode(Cancel(7))) is None is keys.refusal(wire.encode(Ask(id=7, what="health")))
    long = wire.encode(Ask(id=7, what="model", model="m" * gate.MAX_KEYLESS_BYTES))
    assert keys.refusal(long).code == 401 and Gate(()).refusal(long) is None


def test_what_is_said_of_a_running_request_needs_no_key():
    """A refusal would have the id of that request, and end it."""
    told = Gate(["k"])
    for message in (Cancel(7, 0, 3), CalledTool(7, 0, "x" * 256)):
        assert told.refusal(wire.encode(message)) is None
    assert told.refusal(wire.encode(CalledTool(7, 0, "x" * 5000))).code == 401, "only a small one"


def test_requests_of_agents_are_far_from_the_limits():
    """Ten thousand messages with parts, a thousand tools with schemas, all sampling parameters."""
    part = {"type": "text", "text": "x"}
    messages = [{"role": "user", "content": [part, part]} for _ in range(10_000)]
    schema = {"type": "object", "properties": {str(n): {"type": "string", "description": "d"} for n in range(20)}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}} for _ in range(1000)]
    sampling = Sampling(allowed_token_ids=tuple(range(1 << 16)), bad_token_ids=((1,) * 256,) * 1024)
    assert Gate(()).refusal(wire.encode(Generate(id=1, prompt=ChatPrompt(messages), sampling=sampling))) is None
    assert Gate(()).refusal(wire.encode(Generate(id=1, prompt=ChatPrompt(messages[:99], tools)))) is None


@pytest.mark.parametrize("keys", [(), ("a:key",)])
def test_millions_of_objects_cost_milliseconds(keys):
    """Whether a key is needed or not, nothing of them is decoded."""
    with stack(api_key=keys) as (router, _, client):
        took, inner = [], router.server._from_client

        def timed(who: bytes, payload: bytes) -> None:
            began = time.thread_time()
            inner(who, payload)
            took.append(time.thread_time() - began)

        router.server._clients.socket._on_message = timed
        client.link.send(EMPTY_OBJECTS)
        error = client.receive()
        code, field = (401, "api_key") if keys else (400, "prompt.messages")
        assert (error.id, error.code, error.field) == (7, code, field)
        assert eventually(lambda: took)[0] < 0.1, "seconds of CPU; the decoder takes five"
        client.send(Generate(id=1, prompt=PROMPT, sampling=Sampling(max_tokens=8), api_key="key"))
        (delta,) = client.gather(1).values()
        assert list(array("i", delta.ids)) == continuation(PROMPT.ids, 8)


@pytest.mark.parametrize(
    "payload",
    [
        b"\x83\xa4type\xa8tokenize\xa2id\x07\xa6prompt\x82\xa4type\xa4text\xa4text\xa2\xff\xfe",
        b"\x83\xa4type\xa8tokenize\xa2id\x07\xa7api_key\xa2\xff\xfe",
        b"\x83\xa4type\xa2\xff\xfe\xa2id\x07\xa1x\x01",
        b"\x82\xa2id\x07\xa2\xff\xfe\x01",
    ],
)
def test_invalid_utf8_gets_an_answer(payload, caplog):
    with stack() as (_, _, client):
        client.link.send(payload)
        error = client.receive()
        assert isinstance(error, Error) and error.code == 400 and "malformed message" in error.message
    assert not caplog.records


def test_a_fault_of_the_router_costs_one_message(monkeypatch, caplog):
    """The client is told; the worker's runs are sent again."""
    with stack() as (router, _, client):
        step, failed = router.server.core.step, []

        def fails_once(*args):
            if not failed:
                failed.append(args)
                raise KeyError("a fault")
            return step(*args)

        monkeypatch.setattr(router.server.core, "step", fails_once)
        client.send(Generate(id=1, prompt=PROMPT, sampling=Sampling(max_tokens=8)))
        (delta,) = client.gather(1).values()
        assert list(array("i", delta.ids)) == continuation(PROMPT.ids, 8) and failed
        monkeypatch.setattr(router.server._handlers, "take", lambda *_: 1 / 0)
        error = client.ask(Ask(id=2, what="health"))
        assert (error.id, error.code, error.message) == (2, 500, loop.FAILED)
    assert "a message of worker w0 failed" in caplog.text and "a message of a client failed" in caplog.text


def test_who_has_no_key_is_refused_over_the_socket():
    with stack(api_key=("a:key",)) as (router, _, client):
        stranger = Client(router.server.client_address)
        refused = stranger.ask(Generate(id=3, prompt=PROMPT, api_key="other"))
        assert (refused.id, refused.code, refused.field) == (3, 401, "api_key")
        assert stranger.ask(Ask(id=4, what="health")).data
        stranger.link.close()
