"""`radixrt top`: what fits into a terminal, and what its keys do."""

from __future__ import annotations

import os
import re
import threading

import pytest

from radixrt.client import top
from radixrt.report.top import to_lines
from tests.waiting import eventually

RUN = {"tenant": "t", "model": "m", "worker": "w0", "state": "decode", "hit": 40, "bound": 80, "first": 0.2}


def run(id: int, **changes) -> dict:
    return RUN | {"id": str(id), "program": f"p{id}", "prompt": 100, "generated": 5, "seconds": 1.0} | changes


def state(**changes) -> dict:
    misses = {"never_seen": 10, "elsewhere": 0, "evicted": 30, "page_rounding": 0, "logits": 0}
    totals = {"requests": 9, "prompt_tokens": 100, "hit_tokens": 60, "bound_tokens": 90, "misses": misses}
    worker = {"name": "w0", "state": "serving", "running": 2, "waiting": 1, "tokens": 3000, "stalled_seconds": 0.0}
    worker |= {"pages_total": 200, "pages_used": 50, "host_used": 0}
    ended = run(1) | {"end": "stop", "misses": misses, "why": "30 of 100 tokens were evicted"}
    latency = {"tenant": "t", "model": "m", "first_p50": 0.12, "first_p90": 1.5, "first_p99": None}
    latency |= {"token_p50": 0.01, "token_p90": 0.02, "token_p99": 0.03}
    return {
        "version": "1", "tenant": "", "time": 0.0, "uptime": 60.0, "totals": totals, "point": [0, 100, 50, 75],
        "requests": [run(i) for i in range(3)], "recent": [ended] * 50, "workers": [worker], "latency": [latency],
        "volatile": [{"before": "It is ", "requests": 8, "tokens": 5000}],
        "failures": [{"time": 0.0, "worker": "w0", "text": "it\x1b[2J failed"}],
    } | changes  # fmt: skip


@pytest.mark.parametrize(("width", "height"), [(60, 16), (80, 24), (200, 60), (10, 3)])
def test_lines_fit_the_terminal(width, height):
    lines = to_lines(state(), width, height)
    assert len(lines) <= height and max(map(len, lines)) <= width
    assert any("60.0% hit,  90.0% possible" in line for line in lines) or width < 60


def test_all_is_shown_where_there_is_room():
    text = "\n".join(to_lines(state(), 200, 100))
    for shown in ("evicted, or not computed yet 75%", "25%", "120ms", "1.5s", "It is ", "p2"):
        assert shown in text, shown
    assert text.count("were evicted") == 50 and "\x1b" not in text, "clients' names do not steer the terminal"


def test_a_tenants_view_has_workers_without_figures():
    worker = {"name": "w0", "state": "serving", "stalled_seconds": 0.0}
    (line,) = [line for line in to_lines(state(tenant="t", workers=[worker]), 120, 40) if line.startswith("w0")]
    assert line.split() == ["w0", "serving", "-", "-", "-", "-", "-", "0ms"]


def test_requests_are_sorted():
    rows = [run(1, prompt=5000, seconds=1.0), run(2, prompt=10, seconds=9.0, generated=700)]
    order = {
        sort: re.findall(r" (p\d) ", "\n".join(to_lines(state(requests=rows, recent=[]), 120, 40, sort)))
        for sort in ("seconds", "prompt", "misses", "generated")
    }
    assert order == {
        "seconds": ["p2", "p1"], "prompt": ["p1", "p2"], "misses": ["p1", "p2"], "generated": ["p2", "p1"],
    }  # fmt: skip


class Client:
    def live(self, part: str) -> dict:
        return state()


def test_keys_sort_and_quit():
    theirs, ours = os.openpty()
    shown: list[bytes] = []

    def read() -> None:
        while b"\x1b[?1049l" not in b"".join(shown):
            shown.append(os.read(theirs, 65536))

    with open(ours, "r+b", buffering=0) as raw, open(ours, "w", closefd=False) as out:
        threads = [threading.Thread(target=read), threading.Thread(target=top.run, args=(Client(), raw, out))]
        for thread in threads:
            thread.start()
        eventually(lambda: b"by seconds" in b"".join(shown))
        os.write(theirs, b"s")
        eventually(lambda: b"by prompt" in b"".join(shown))
        os.write(theirs, b"q")
        for thread in threads:
            thread.join(5)
            assert not thread.is_alive()
    os.close(theirs)
