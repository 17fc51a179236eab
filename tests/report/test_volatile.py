"""Text that changes with every request, near the start of prompts: it is named, and ordinary chats are not."""

from __future__ import annotations

import json
import random
import re
from array import array
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import pytest

from radixrt.messages import ChatPrompt, Namespace
from radixrt.report import Report, to_text
from radixrt.report.volatile import (
    HEAD,
    LONG,
    MAX_KINDS,
    MAX_NAMESPACES,
    MAX_SPAN_TOKENS,
    MIN_CHANGES,
    MIN_SAME_TOKENS,
    NEAR,
    Change,
    PrefixBreakingTexts,
    aligned,
)
from radixrt.tokens import Tokenizer, load_tokenizer
from tests.checkpoints import make_tokenizer
from tests.frontend.conftest import serving
from tests.recorded import CORPORA, chats

Ids = list[int]


def to_bytes(ids: Ids) -> bytes:
    return array("i", ids).tobytes()


def some(rng: random.Random, count: int) -> Ids:
    return [rng.randrange(30_000) for _ in range(count)]


def numbers(ids: bytes) -> str:
    """Token ids as a text."""
    return " ".join(map(str, memoryview(ids).cast("i")))


class Feed:
    """A report and what it must say of the prompts it gets."""

    def __init__(self) -> None:
        self.report = Report(10**7)

    def ask(self, *prompts: Ids, tenant: str = "t", namespace: str = "n") -> None:
        for prompt in prompts:
            self.report.arrived(namespace, to_bytes(prompt), tenant)

    def rows(self, tenant: str | None = None) -> list[dict[str, Any]]:
        return self.report.to_json(tenant, numbers)["volatile"]


def common(one: Ids, other: Ids) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


# ---------------------------------------------------------------- what is named


@pytest.mark.parametrize("seed", range(30))
def test_a_nonce_is_named_with_what_it_cost(seed):
    """Sessions that grow, one nonce for each request, of any length and place: the tokens lost are those that a cache
    without it would have hit, from the second request on."""
    rng, feed = random.Random(seed), Feed()
    head, trunk = some(rng, rng.choice((0, 1, 5, 300, NEAR - 200))), some(rng, LONG + rng.randrange(400))
    size = rng.choice((1, 2, 8, 40, MAX_SPAN_TOKENS - 20))
    sessions = [trunk + some(rng, 5) for _ in range(3)]
    tails: list[Ids] = []
    lost = []
    for _ in range(20):
        session = rng.choice(sessions)
        session += some(rng, rng.randrange(40))
        nonce = some(rng, max(1, size - rng.randrange(3)))
        feed.ask(head + nonce + session)
        lost.append(max((common(session, tail) for tail in tails), default=0))
        tails.append(list(session))
    (row,) = feed.rows()
    assert (row["tenant"], row["requests"], row["at"]) == ("t", 19, len(head))
    assert row["lost_tokens"] == sum(lost)
    assert row["values"][-1] == " ".join(map(str, nonce))
    assert row["before"] == " ".join(map(str, head[-24:])) and row["after"] == " ".join(map(str, trunk[:24]))


def test_two_of_them_in_one_prompt():
    rng, feed = random.Random(1), Feed()
    head, middle, trunk = some(rng, 20), some(rng, 200), some(rng, 1000)
    for _ in range(12):
        clock, nonce = some(rng, 3), some(rng, 9)
        feed.ask(head + clock + middle + nonce + trunk)
    first, second = feed.rows()
    assert (first["at"], first["requests"], second["at"], second["requests"]) == (20, 11, 223, 11)
    assert second["lost_tokens"] == 11 * 1000 and first["lost_tokens"] == 11 * 1209
    assert first["values"][-1] == " ".join(map(str, clock)) and second["values"][-1] == " ".join(map(str, nonce))


def test_a_clock_whose_digits_repeat_is_one_span():
    rng, feed = random.Random(2), Feed()
    head, trunk = some(rng, 30), some(rng, 700)
    times = [[1, 2, 0, 3, 4, 4], [1, 2, 0, 3, 5, 1], [1, 2, 0, 4, 0, 9], [1, 3, 0, 0, 0, 9], [1, 3, 0, 0, 1, 0]]
    feed.ask(*[head + [9, 9, *time[2:]] + trunk for time in times], *[head + time + trunk for time in times])
    (row,) = feed.rows()
    assert (row["at"], row["requests"]) == (30, 9) and row["values"] == ["1 3 0 0 0 9", "1 3 0 0 1 0"]
    assert 9 * 700 <= row["lost_tokens"] <= 9 * 705


def test_values_that_end_alike():
    rng, feed = random.Random(11), Feed()
    head, trunk = some(rng, 30), some(rng, 700)
    values = [[i, i + 1, 0, 0] for i in range(0, 10, 2)] + [[i, i + 1, i, i] for i in range(20, 30, 2)]
    feed.ask(*[head + value + trunk for value in values])
    (row,) = feed.rows()
    assert (row["at"], row["requests"], row["values"][-1]) == (30, 9, "28 29 28 28")
    assert row["lost_tokens"] == 4 * 702 + 5 * 700


def test_what_was_hit_is_not_lost():
    """A clock that shows the same twice: the second prompt hits all of the first one."""
    rng, feed = random.Random(12), Feed()
    head, trunk = some(rng, 30), some(rng, 700)
    for minute in range(12):
        chat = head + [minute] + trunk
        feed.ask(*[chat, chat + some(rng, 300)][: 1 + (minute % 3 == 1)])
    (row,) = feed.rows()
    assert (row["requests"], row["lost_tokens"]) == (11, 11 * 700)
    feed.ask(head + [99] + trunk[:100] + some(rng, 300), head + [99] + trunk)
    (row,) = feed.rows()
    assert row["lost_tokens"] == 11 * 700 + 600


def test_agents_of_two_kinds_take_turns():
    rng, feed = random.Random(3), Feed()
    kinds = [(some(rng, 10 + i), some(rng, 600)) for i in range(2)]
    for _ in range(12):
        for head, trunk in kinds:
            feed.ask(head + some(rng, 4) + trunk + some(rng, 50))
    assert sorted((row["at"], row["requests"]) for row in feed.rows()) == [(10, 11), (11, 11)]


def test_a_request_for_several_choices_counts_once():
    rng, feed = random.Random(16), Feed()
    head, trunk = some(rng, 20), some(rng, 400)
    for _ in range(10):
        feed.ask(*[head + some(rng, 4) + trunk] * 5)
    (row,) = feed.rows()
    assert (row["requests"], row["lost_tokens"]) == (9, 9 * 400)


def test_chats_that_grow_do_not_hide_it():
    rng, feed = random.Random(15), Feed()
    head, trunk, chat = some(rng, 20), some(rng, 400), some(rng, 300)
    for _ in range(10):
        feed.ask(head + some(rng, 4) + trunk)
        for _ in range(5):
            chat = chat[: NEAR - 300] + some(rng, 300)
            feed.ask(chat)
    (row,) = feed.rows()
    assert (row["at"], row["requests"]) == (20, 9)


def test_it_is_named_as_soon_as_it_is_sure():
    rng, feed = random.Random(4), Feed()
    head, trunk = some(rng, 10), some(rng, LONG + 50)
    for requests in range(1, 13):
        feed.ask(head + some(rng, 4) + trunk)
        assert bool(feed.rows()) == (requests > MIN_CHANGES)


# ---------------------------------------------------------------- what is not


def test_ordinary_requests_are_not_named():
    """Chats that grow, forks, questions after a long trunk, prompts that share nothing, and the same ones again."""
    rng, feed = random.Random(5), Feed()
    trunk = some(rng, 2000)
    for _ in range(20):
        chat = trunk + some(rng, 30)
        for _ in range(6):
            chat += some(rng, 300)
            feed.ask(chat)
        feed.ask(*[chat + some(rng, 20) + some(rng, 400) for _ in range(4)], some(rng, 3000), chat)
    assert feed.rows() == []


def test_a_name_that_stays_for_a_session_is_none():
    """Another short text for each user, not for each request."""
    rng, feed = random.Random(6), Feed()
    head, trunk = some(rng, 40), some(rng, 1000)
    for _ in range(20):
        chat = head + some(rng, 3) + trunk
        for _ in range(5):
            chat = chat + some(rng, 100)
            feed.ask(chat)
    assert feed.rows() == []


@pytest.mark.parametrize(
    ("span", "same"), [(MAX_SPAN_TOKENS * 2, LONG * 4), (4, LONG - 40)], ids=["a long text changes", "little follows"]
)
def test_what_is_no_short_text_before_a_long_one(span, same):
    rng, feed = random.Random(7), Feed()
    head, trunk = some(rng, 40), some(rng, same)
    feed.ask(*[head + some(rng, span) + trunk + some(rng, 600) for _ in range(20)])
    assert feed.rows() == []


def test_alignment_is_exact():
    rng = random.Random(8)
    for _ in range(300):
        head, trunk = some(rng, rng.randrange(60)), some(rng, LONG + rng.randrange(99))
        old, new = some(rng, rng.randrange(MAX_SPAN_TOKENS)), some(rng, rng.randrange(MAX_SPAN_TOKENS))
        same = common(old + trunk, new + trunk)
        found = aligned(to_bytes(head + old + trunk), to_bytes(head + new + trunk), len(head) + same)
        if old == new:
            assert found == []
            continue
        back = common((old + trunk)[::-1], (new + trunk)[::-1])
        (change,) = found
        assert change.old == change.new == len(head) + same
        assert len(head + old) - change.old_end == len(head + new) - change.new_end <= back


def test_alignment_of_dull_text_is_true():
    """Token ids whose bytes are alike, also where they are not those of one token."""
    rng, found = random.Random(13), 0
    for _ in range(2000):
        head, trunk = (
            [rng.choice((0, 0, 0, 256)) for _ in range(40)],
            [rng.choice([0] * 50 + [256]) for _ in range(500)],
        )
        old, new = ([rng.choice((0, 256, 1 << 16)) for _ in range(rng.randrange(9))] for _ in range(2))
        one, other = head + old + trunk, head + new + trunk
        before = (0, 0)
        for change in aligned(to_bytes(one), to_bytes(other), common(one, other)):
            assert one[before[0] : change.old] == other[before[1] : change.new]
            assert before == (0, 0) or change.old - before[0] >= MIN_SAME_TOKENS
            before, found = (change.old_end, change.new_end), found + 1
    assert found > 500


def test_bytes_of_two_tokens_are_no_token():
    zeros = [0] * (LONG + 99)
    assert aligned(to_bytes([5, 256, *zeros]), to_bytes([5, 7, *zeros]), 1) == [Change(1, 2, 1, 2)]


def test_a_span_is_short_in_both():
    rng = random.Random(14)
    head, trunk = some(rng, 40), some(rng, 1000)
    for old, new in ((200, 5), (5, 200)):
        prompts = [to_bytes(head + some(rng, size) + trunk) for size in (old, new)]
        assert aligned(*prompts, len(head)) == []


def test_memory_is_bounded():
    rng, volatile = random.Random(9), PrefixBreakingTexts()
    for tenant in range(MAX_NAMESPACES + 20):
        for _ in range(MAX_KINDS + 3):
            volatile.arrived("t", f"n{tenant}", to_bytes(some(rng, 400)), 0)
    heads = [kind.head for kinds in volatile._kinds.values() for kind in kinds]
    assert len(volatile._kinds) == MAX_NAMESPACES and len(heads) == MAX_NAMESPACES * MAX_KINDS
    volatile.arrived("t", "n", to_bytes(some(rng, HEAD + 99)), 0)
    assert len(volatile._kinds["t", "n"][0].head) == HEAD * 4


# ---------------------------------------------------------------- recorded conversations

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + (m.content or '') }}{% for c in m.tool_calls or [] %}"
    "{{ c | tojson }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}{{ '<|im_start|>assistant\n' }}"
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    folder = make_tokenizer(tmp_path_factory.mktemp("made"))
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": CHATML}))
    return load_tokenizer(folder)


def prompts(tokenizer: Tokenizer, shared_data: Path, name: str, header: str = "") -> Iterator[Ids]:
    """Ids of the prompts of a corpus; `header` is a format, given the number of the prompt."""
    number = 0
    for chat in chats(shared_data, name):
        for at, message in enumerate(chat):
            if message["role"] == "assistant":
                first = [{"role": "system", "content": header.format(number * 7919 % 100_003)}] if header else []
                text = tokenizer.apply_chat(ChatPrompt([*first, *chat[:at]]))
                yield memoryview(tokenizer.encode_bytes(text, False)).cast("i").tolist()
                number += 1


@pytest.mark.parametrize("name", CORPORA)
def test_recorded_conversations_raise_no_alarm(tokenizer, shared_data, name):
    feed = Feed()
    feed.ask(*islice(prompts(tokenizer, shared_data, name), 250))
    assert feed.rows() == []


@pytest.mark.parametrize("name", ["tau_bench", "mint_bench"])
@pytest.mark.parametrize(
    "header", ["x-anthropic-billing-header: cc_version=2.1.7; cch={:05x};", "Current time: 12:03:44.{:06d}"]
)
def test_a_planted_header_is_named_and_costs_what_it_costs(tokenizer, shared_data, name, header):
    feed, plain = Feed(), Feed()
    asked = list(islice(prompts(tokenizer, shared_data, name, header), 60))
    feed.ask(*asked)
    known = [plain.report.arrived("n", to_bytes(p)) for p in islice(prompts(tokenizer, shared_data, name), 60)]
    row = feed.report.to_json("t", lambda ids: tokenizer.decode(memoryview(ids).cast("i").tolist(), False))["volatile"][
        0
    ]
    assert header.partition("{")[0][-20:] in row["before"] + row["values"][-1]
    assert all(value and len(value) < 30 for value in row["values"]) and row["requests"] >= 58 * (name == "tau_bench")
    if name == "tau_bench":
        assert row["lost_tokens"] == pytest.approx(sum(known), rel=0.02)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", CORPORA)
def test_all_recorded_conversations_raise_no_alarm(tokenizer, shared_data, name):
    feed = Feed()
    feed.ask(*prompts(tokenizer, shared_data, name))
    assert feed.rows() == []


# ---------------------------------------------------------------- who sees it


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = make_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    (path / "config.json").write_text(json.dumps({"vocab_size": 512}))
    return path


def test_a_tenant_sees_its_own_text_and_no_other(folder):
    secret = {"key-a": "alpha", "key-b": "beta"}
    with serving(folder, workers=1, api_key=("a:key-a", "b:key-b")) as frontend, httpx.Client() as client:
        for key, word in secret.items():
            for number in range(10):
                header = f"For {word} only, request {number * 7919:06d}; be kind. " + "Think twice. " * 60
                body = {
                    "max_tokens": 1,
                    "messages": [{"role": "system", "content": header}, {"role": "user", "content": "x"}],
                }
                answer = client.post(frontend.url + "/v1/chat/completions", json=body, headers={"x-api-key": key})
                assert answer.status_code == 200
        for key, word in secret.items():
            report = client.get(frontend.url + "/v1/report", headers={"x-api-key": key}).json()
            (row,) = report["volatile"]
            other = next(one for one in secret.values() if one != word)
            assert word in row["before"] and other not in str(report) and row["tenant"] == key[-1]
            assert row["requests"] == 9 and row["after"].startswith("; be kind")
            text = to_text(report)
            assert "9 requests changed it" in text and f"{row['values'][0]} | {row['values'][1]}]; be kind" in text
            assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize("salt", ["alice", "\n", " ", "\nm\n", "0"])
def test_what_is_behind_a_salt_is_not_shown(salt):
    """Not to others of the tenant, nor to who asks for all tenants: how much of it changes, and where."""
    rng, feed = random.Random(17), Feed()
    for namespace, secret in ((Namespace("t", "m"), 0), (Namespace("t", "m", salt=salt), 7_000_000)):
        head, trunk = some(rng, 30), some(rng, 600)
        asked = [[secret + token for token in head + some(rng, 4) + trunk] for _ in range(12)]
        feed.ask(*asked, namespace=namespace.key)
    for tenant in ("t", None):
        report = feed.report.to_json(tenant, numbers)
        plain, masked = sorted(report["volatile"], key=lambda row: row["masked"])
        assert (plain["masked"], plain["length"]) == (False, 4) and plain["values"] and plain["before"]
        shown = {"before": None, "values": None, "after": None, "masked": True, "at": 30, "length": 4}
        assert masked | shown == masked and (masked["requests"], masked["lost_tokens"]) == (11, 11 * 600)
        assert re.search(r"\b\d{4,5}\b", str(report)) and not re.search(r"\b70\d{5}\b", str(report))
        assert "    4 tokens after 30 tokens, not shown: they have a cache_salt" in to_text(report).splitlines()


def test_without_a_tokenizer_there_is_no_text():
    rng, feed = random.Random(10), Feed()
    trunk = some(rng, 600)
    feed.ask(*[[1, 2, 3, *some(rng, 4), *trunk] for _ in range(12)])
    report = feed.report.to_json()
    (row,) = report["volatile"]
    assert (row["at"], row["before"], row["values"]) == (3, None, None) and "4 tokens after 3 tokens\n" in to_text(
        report
    )
    assert feed.report.to_json("someone else")["volatile"] == []
