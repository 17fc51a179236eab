"""Time to first token of turn 30 of a chat of 40,000 tokens, over HTTP; the worker is a fake that takes no time.

    python -m bench.sessions [--quick]

Each session is a chat of 30 turns, each of which sends all messages. The last turn is timed, from the first byte sent
to the first chunk received. The references, in the same run: the same with sessions off (--session-tokens 0), and the
same chat sent to a server that has never seen it, which has to encode all of it. Each turn must hit all of the turn
before it and of its answer, up to the last token whose KV was computed.
"""

from __future__ import annotations

import argparse
import http.client
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.common import save, table
from radixrt.config import FrontendConfig, RouterConfig, StackConfig, WorkerConfig, resolve
from radixrt.demo.checkpoint import make_checkpoint
from radixrt.launch.launcher import Stack
from radixrt.process.ports import free_tcp_address

TURNS, ANSWER = 30, 64
WORDS = "the quick dog thinks about the question again and then it jumps over the answer of the fox ".split()
WORDS_A_TURN = 480
LIMIT_MS = 5.0
"""The most that turn 30 may take, at the median."""


class Talk:
    """A chat on a connection of its own."""

    def __init__(self, port: int, number: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port)
        self._number = number
        self.messages: list[dict[str, str]] = []

    def say(self) -> None:
        """Append a message of the user, which no other chat has."""
        turn = len(self.messages)
        words = [WORDS[(i * (turn + 3) + self._number) % len(WORDS)] for i in range(WORDS_A_TURN)]
        self.messages.append({"role": "user", "content": f"{self._number}.{turn} " + " ".join(words)})

    def ask(self) -> tuple[float, dict[str, Any]]:
        """Send the chat, and append the answer. Returns (seconds to the first chunk, usage)."""
        fields = {"max_tokens": ANSWER, "stream": True, "stream_options": {"include_usage": True}}
        body = json.dumps({"messages": self.messages, "temperature": 0} | fields).encode()
        began = time.perf_counter()
        self._connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
        response = self._connection.getresponse()
        lines = [response.readline()]
        seconds = time.perf_counter() - began
        lines += response.read().splitlines()
        assert response.status == 200, lines
        chunks = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
        text = "".join(choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"])
        self.messages.append({"role": "assistant", "content": text})
        return seconds, chunks[-1]["usage"]

    def close(self) -> None:
        self._connection.close()


@contextmanager
def stack(folder: Path, session_tokens: int, cache: int) -> Iterator[int]:
    """Run a router, a fake worker and a front end. Yields the HTTP port."""
    addresses = {"client_address": free_tcp_address()}
    router = RouterConfig(model=str(folder), report_tokens=cache, **addresses)
    worker = WorkerConfig(model=str(folder), fake="0,0", max_total_tokens=cache, max_num_batched_tokens=1 << 16)
    port = int(free_tcp_address().rpartition(":")[2])
    frontend = FrontendConfig(model=str(folder), port=port, session_tokens=session_tokens)
    with Stack(StackConfig(resolve(router), worker, resolve(frontend))) as running:
        running.start()
        yield port


def measure(port: int, sessions: int, *, hits: bool) -> tuple[list[float], list[Talk], dict[str, Any]]:
    """(seconds of the last turn of each session, the sessions, the last usage)."""
    times, talks, usage = [], [], {}
    for number in range(sessions):
        talk = Talk(port, number)
        before = 0
        for _ in range(TURNS):
            talk.say()
            seconds, usage = talk.ask()
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            assert not hits or cached >= before, f"turn {len(talk.messages) // 2} hit {cached} tokens, not {before}"
            before = usage["prompt_tokens"] + usage["completion_tokens"] - 1
        times.append(seconds)
        talks.append(talk)
        talk.close()
    return times, talks, usage


def measure_unseen(port: int, talks: list[Talk]) -> list[float]:
    """Times of the last turns of chats, in seconds, at a server that sees them for the first time."""
    times = []
    for number, seen in enumerate(talks):
        talk = Talk(port, number)
        talk.messages = seen.messages[:-1]
        times.append(talk.ask()[0])
        talk.close()
    return times


def row(what: str, times: list[float], usage: dict[str, Any] | None = None) -> dict[str, Any]:
    ordered = sorted(times)
    figures = {"p50 ms": statistics.median(ordered) * 1e3, "p90 ms": ordered[int(len(ordered) * 0.9)] * 1e3}
    if usage is None:
        return {"what": what} | figures
    return {"what": what} | figures | {
        "prompt": usage["prompt_tokens"], "cached": usage["prompt_tokens_details"]["cached_tokens"]
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two sessions, to see that it runs")
    sessions = 2 if parser.parse_args().quick else 24
    cache = sessions << 16
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_checkpoint(folder)
        with stack(folder, FrontendConfig().session_tokens, cache) as port:
            times, talks, usage = measure(port, sessions, hits=True)
            rows.append(row(f"turn {TURNS}", times, usage))
        with stack(folder, 0, cache) as port:
            times, _, usage = measure(port, sessions, hits=False)
            rows.append(row(f"turn {TURNS}, sessions off", times, usage))
        with stack(folder, 0, cache) as port:
            rows.append(row("the same chat, never seen before", measure_unseen(port, talks)))
    print("time to first token over HTTP\n", table(rows), sep="\n")
    print(f"limit at p50: {LIMIT_MS} ms" + ("" if rows[0]["p50 ms"] < LIMIT_MS else ": NOT KEPT"))
    if sessions > 2:
        save("sessions", rows, sessions=sessions, turns=TURNS, limit_ms=LIMIT_MS)


if __name__ == "__main__":
    main()
