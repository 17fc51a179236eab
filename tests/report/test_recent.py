"""What has happened lately: kept in bounded memory, and only for whose it is."""

from __future__ import annotations

from array import array

import pytest

from radixrt.report import Report
from radixrt.report.causes import Misses, sentence
from radixrt.report.conversations import KEPT_CONVERSATIONS, KEPT_TURNS, MARK_TOKENS, Conversations, Link
from radixrt.report.evictions import Eviction, Evictions
from radixrt.report.latency import Histogram
from radixrt.report.recent import KEPT_ID_BYTES, KEPT_POINTS, KEPT_REQUESTS, KEPT_UNSORTED, POINT_SECONDS, Ended, Recent


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def ids(*tokens: int) -> bytes:
    return array("i", tokens).tobytes()


def ended(id: int, tenant: str = "t", **changes) -> Ended:
    fields = {
        "program": "",
        "model": "m",
        "worker": "w",
        "end": "stop",
        "generated": 1,
        "arrived": 0.0,
        "index": 0,
        "ids": b"",
        "answer": b"",
        "first": 0.1,
    }
    fields |= {"prompt": 10, "hit": 4, "bound": 6, "misses": Misses(never_seen=3, evicted=2, logits=1)}
    return Ended(id=str(id), namespace=f"{tenant}\nm\n\n", tenant=tenant, **(fields | changes))


def test_the_last_requests_are_kept_newest_first_each_for_its_tenant():
    recent = Recent(clock := Clock())
    for i in range(KEPT_REQUESTS + 5):
        clock.now += 1
        recent.ended(ended(i))
    clock.now += 1
    recent.ended(ended(1000, "other", ids=ids(7)))
    assert [one.id for one in recent.requests("t")] == [str(i) for i in range(KEPT_REQUESTS + 4, 4, -1)]
    assert [one.id for one in recent.requests(None)][:2] == ["1000", str(KEPT_REQUESTS + 4)]
    assert len(recent.requests(None)) == KEPT_REQUESTS and recent.requests("nobody") == []
    assert recent.find("t", "1000") is None and recent.find("t", "4") is None
    assert recent.find(None, "1000").ids == ids(7)


def test_prompts_take_bounded_memory():
    recent, part = Recent(Clock()), bytes(KEPT_ID_BYTES // 4)
    for i in range(6):
        recent.ended(ended(i, tenant=str(i), ids=part))
    assert [recent.find(None, str(i)).ids == part for i in range(6)] == [False] * 2 + [True] * 4
    for i in range(100, 100 + KEPT_UNSORTED):
        recent.ended(ended(i, ids=b"ids!"))
    assert not any(recent.find(None, str(i)).ids for i in range(6)) and all(one.ids for one in recent.requests("t"))


def test_history_has_a_point_for_each_time_and_the_sums_in_it():
    recent = Recent(clock := Clock())
    recent.ended(ended(1))
    recent.ended(ended(2, "other"))
    clock.now += 3 * POINT_SECONDS
    recent.ended(ended(3))
    recent.ended(ended(4, misses=None))  # its prompt was not computed
    assert [point[1:] for point in recent.history("t")] == [[10, 4, 6], [0, 0, 0], [0, 0, 0], [10, 4, 6]]
    assert [point[1:] for point in recent.history(None)] == [[20, 8, 12], [0, 0, 0], [0, 0, 0], [10, 4, 6]]
    assert recent.point(None) == recent.history(None)[-1] == [1015.0, 10, 4, 6]
    clock.now += 10 * KEPT_POINTS * POINT_SECONDS
    assert len(recent.history(None)) <= KEPT_POINTS and recent.point("t")[1:] == [0, 0, 0]


def test_a_tenant_sees_failures_of_workers_and_its_own():
    recent = Recent(Clock())
    for tenant in ("", "t", "other"):
        recent.failed(tenant, "w", f"of {tenant}")
    assert [one.text for one in recent.failures("t")] == ["of t", "of "]
    assert len(list(recent.failures(None))) == 3


# ---------------------------------------------------------------- conversations


class Chats:
    """Tells conversations of requests as a router does: how much of each prompt was seen before."""

    def __init__(self) -> None:
        self.kept, self._report, self._at = Conversations(), Report(10**6), 0.0

    def ask(self, *prompt: int, answer: tuple[int, ...] = (), namespace: str = "n", tenant: str = "t") -> None:
        known = self._report.arrived(namespace, ids(*prompt))
        self._report.arrived(namespace, ids(*prompt, *answer[:-1]))
        self._at += 1
        self.kept.ended(Link.of(self._at, namespace, tenant, "", ids(*prompt), 0, known, ids(*answer)))

    def turns(self, tenant: str | None = "t") -> list[list[int]]:
        """Lengths of the prompts of each conversation, the latest first."""
        return [[turn.prompt for turn in one.turns] for one in self.kept.latest(tenant)]


SYSTEM = tuple(range(100))
THOUGHT, SAID = (51, 52, 53), (61, 62, 63, 64)


@pytest.mark.parametrize("looks", [True, False])
@pytest.mark.parametrize("again", [(*THOUGHT, *SAID), SAID, (*THOUGHT, *SAID[:2], 60)])
def test_a_prompt_that_goes_on_with_the_answer_is_the_next_turn(again, looks):
    """Whether the answer comes back as it was generated, without its thoughts, or partly in other tokens."""
    chats = Chats()
    one, two = SYSTEM + (1,) * 40, SYSTEM + (2,) * 40
    for prompt in (one, two):
        chats.ask(*prompt, answer=(*THOUGHT, *SAID))
    for turn in (200, 300):
        one, two = (*one, *again, turn), (*two, *again, turn)
        chats.ask(*two, answer=(*THOUGHT, *SAID))
        chats.ask(*one, answer=(*THOUGHT, *SAID))
        assert not looks or chats.turns()
    lengths = [140 + i * (len(again) + 1) for i in range(3)]
    assert chats.turns() == [lengths, lengths]
    assert [one.first for one in chats.kept.latest("t")] == [ids(*SYSTEM[:MARK_TOKENS]), ids(*(2,) * MARK_TOKENS)]


def test_a_prompt_that_parts_from_a_conversation_begins_another():
    chats = Chats()
    chats.ask(*SYSTEM, 1, 2, 3, answer=SAID)
    chats.ask(*SYSTEM, 1, 2, 9, *SAID, 5)
    chats.ask(*SYSTEM[:50])
    assert chats.turns() == [[50], [108], [103]]


def test_a_conversation_stays_in_its_namespace_and_with_its_tenant():
    chats = Chats()
    chats.ask(*SYSTEM)
    chats.ask(*SYSTEM, 1, namespace="other")
    chats.ask(*SYSTEM, 1, 2, tenant="u")
    assert chats.turns() == [[101], [100]] and chats.turns("u") == [[102]]
    assert len(chats.turns(None)) == 3


def test_conversations_and_their_turns_are_bounded():
    chats, path = Chats(), [7]
    for i in range(KEPT_CONVERSATIONS + 10):
        chats.ask(*SYSTEM, -i, 1)
        chats.turns()
    for i in range(KEPT_TURNS + 10):
        chats.ask(*(path := [*path, i]))
    (latest, *others) = chats.kept.latest("t")
    assert (latest.count, len(latest.turns)) == (KEPT_TURNS + 10, KEPT_TURNS)
    assert len(others) == KEPT_CONVERSATIONS - 1


# ---------------------------------------------------------------- evictions and words


@pytest.mark.parametrize(
    ("depth", "length", "low", "high", "found"),
    [(10, 5, 10, 15, True), (10, 5, 0, 11, True), (10, 5, 0, 10, False), (10, 5, 14, 20, True), (10, 5, 15, 20, False)],
)
def test_an_eviction_is_found_by_what_it_took(depth, length, low, high, found):
    evictions, prompt = Evictions(), ids(*range(30))
    part = "n", depth, length, ids(*range(depth, depth + 5))
    evictions.add(Eviction(1.0, "w", *part, "t", "p"))
    assert bool(evictions.find("n", prompt, low, high, "w")) == found
    assert not evictions.find("other", prompt, low, high, "w")
    assert not evictions.find("n", ids(*[9] * 30), low, high, "w")


def test_of_several_evictions_the_latest_on_the_own_worker_counts():
    evictions, part = Evictions(), ("n", 0, 2, ids(1, 2))
    for at, worker in enumerate(("w", "w", "v")):
        evictions.add(Eviction(float(at), worker, *part, "t", "p"))
    assert [evictions.find("n", ids(1, 2), 0, 2, worker).at for worker in ("w", "v", "x")] == [1.0, 2.0, 2.0]


@pytest.mark.parametrize(
    ("misses", "words"),
    [
        (Misses(logits=1), "all that can be reused was: 90 of 100 tokens"),
        (Misses(never_seen=9), "9 of 100 tokens were never seen before"),
        (Misses(never_seen=9, evicted=2, elsewhere=1), "2 of 100 tokens were computed before, and evicted since"),
        (Misses(never_seen=9, evicted=2, elsewhere=3), "3 of 100 tokens are cached on another worker"),
    ],
)
def test_a_short_sentence_names_what_could_have_been_avoided(misses, words):
    assert sentence(100, 90, misses) == words


def test_quantiles_lie_within_their_bucket():
    histogram = Histogram((1.0, 2.0, 4.0))
    assert histogram.quantile(0.5) is None
    for value in (0.5, 1.5, 1.6, 3.0, 99.0):
        histogram.add(value)
    assert [histogram.quantile(share) for share in (0.1, 0.2, 0.4, 0.6, 0.8, 0.99)] == [0.5, 1, 1.5, 2, 4, 4]


def test_uses_are_dated():
    report = Report(10**6, clock := Clock())
    uses = []
    for i in range(5):
        report.arrived("n", ids(1, 2, i))
        report.date_uses()
        uses.append(report.seen.clock)
        clock.now += 10
    assert [report.seconds_since(use) for use in uses] == [50, 40, 30, 20, 10]
    assert report.seconds_since(0) is None
