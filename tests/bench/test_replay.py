"""Recorded sessions as bench.replay sends them."""

from __future__ import annotations

from bench import replay


def request(tokens: int, *runs: tuple[int, int], out: int = 3, **more) -> dict:
    return {"type": "n", "in": tokens, "out": out, "hash_runs": [list(run) for run in runs]} | more


def session(id: str, *requests: dict) -> dict:
    return {"id": id, "tool_tokens": 64, "system_tokens": 70, "requests": list(requests)}


FIRST = session(
    "a",
    request(300, (1, 5)),
    {"type": "subagent", "requests": [request(256, (1, 2), (90, 2))]},
    request(500, (1, 4), (6, 4), think_time=7.0),
    request(500, (1, 4), (6, 4), out=0),
    request(replay.LONGEST + 1, (1, 4000)),
    request(100, (1, 2)),
)
OTHER = session("b", request(300, (1, 5)))


def prompts(monkeypatch, sessions: list[dict]) -> list[tuple[float, bytes]]:
    """When each prompt was sent."""
    found, ask = [], replay.Fleet.ask

    def noted(self, ids, tokens, then=None, tenant=0) -> None:
        found.append((self.clock.now, ids.tobytes()))
        ask(self, ids, tokens, then, tenant)

    monkeypatch.setattr(replay.Fleet, "ask", noted)
    result = replay.measure(sessions, "radixrt", 2, 50_000, 0)
    assert 0 < result["hits"] <= result["infinite"] and result["session_s"] > 0
    return found


def test_sessions_are_sent_as_they_were_recorded(monkeypatch):
    sent = prompts(monkeypatch, [FIRST, OTHER])
    (began, first), (forked, agent), (later, second), (_, other) = sent
    assert [len(ids) // 4 for ids in (first, agent, second, other)] == [300, 256, 500, 300], "no other is sent"
    assert first[: 4 * 64 * 4] == second[: 4 * 64 * 4] and first[4 * 64 * 4 :] != second[4 * 64 * 4 : 4 * 300]
    assert agent[: 4 * 128] == first[: 4 * 128] and agent[4 * 128 :] != first[4 * 128 : 4 * 256]
    assert other[: 4 * 128] == first[: 4 * 128], "the system prompt is the same"
    assert other[4 * 128 : 4 * 192] != first[4 * 128 : 4 * 192], "the rest of another session is not"
    assert began < forked < began + 1 and later > began + 7
