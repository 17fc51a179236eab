"""The figures of the README and of docs/figures.md are those of `bench/results`, to three digits."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from bench.common import RESULTS
from bench.serve.rows import rival_rows

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PAGE = (ROOT / "docs/figures.md").read_text()
STEPS = {
    "Llama 3.1 8B": "worker",
    "Qwen3 30B A3B": "worker_qwen3_30b",
    "DeepSeek V2 Lite": "worker_deepseek_v2_lite",
    "gpt-oss 20b, experts in bfloat16": "worker_none_gpt_oss_20b",
    "gpt-oss 20b, experts in MXFP4, on an H100": "worker_gpt_oss_20b",
    "Gemma 3 12B": "worker_gemma3_12b",
    "Llama 3.1 8B on two GPUs": "worker_tp2",
    "Llama 70B on four": "worker_tp4_llama_70b",
}
LOADS = ("plain", "trunk16k", "trunk4k", "sessions", "tot", "hit", "cold")
FRONT = {
    "a streamed token over HTTP (`bench.front`)": ("a streamed token", "http, text"),
    "a streamed token over ZMQ, as text": ("a streamed token", "zmq, text"),
    "a request of 4,096 token ids over HTTP": ("a request of 4096 ids", "http"),
}


def cells(name: str, page: str = PAGE) -> list[str]:
    """Of the first row that begins so."""
    found = re.search(rf"^\| {re.escape(name)} ?\|(.*)\|$", page, re.MULTILINE)
    assert found, f"no row of {name}"
    return [cell.strip() for cell in found[1].split("|")]


def rows(name: str) -> list[dict]:
    return json.loads((RESULTS / f"{name}.json").read_text())["rows"]


def shown(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:,.{0 if value >= 100 else 1 if value >= 10 else 2}f}"


@pytest.mark.parametrize("name", STEPS)
def test_steps_of_a_worker(name):
    known = {row["what"]: row for row in rows(STEPS[name])}
    wanted = [known[what] for what in ("decode 1 x 1024", "decode 64 x 1024", "decode 256 x 1024", "prefill 8192 on 0")]
    expected = [f"{shown(row['ms'])} ({row['ratio']:.2f})" for row in wanted]
    assert cells(name) == expected


@pytest.mark.parametrize("load", LOADS)
def test_loads_through_http(load):
    row = next(row for row in rows("serve") if row["load"] == load)
    name = next(line[2:].split("|")[0].strip() for line in PAGE.split("\n") if line.startswith(f"| {load}: "))
    speed, first, after, cached = cells(name)
    if speed:
        assert speed == f"{row['out_tok_s']:,.0f}" and after == f"{row['tpot_p50_ms']:.1f}"
    digits = 0 if row["ttft_p50_ms"] >= 100 else 1
    assert first == f"{row['ttft_p50_ms']:,.{digits}f} / {row['ttft_p99_ms']:,.{digits}f}"
    assert float(cached.rstrip("%")) == pytest.approx(100 * row["cached"], abs=0.05)


@pytest.mark.parametrize("name", FRONT)
def test_the_front_end(name):
    what, over = FRONT[name]
    row = next(row for row in rows("front") if (row["what"], row["over"]) == (what, over))
    assert cells(name)[0] == (f"{row['sum']:.0f}" if row["sum"] >= 100 else f"{row['sum']:.1f}")


# ---------------------------------------------------------------- beside others

H200 = ("radixrt", "vllm 0.26.0, H200", "sglang 0.5.17, H200")
H100 = ("radixrt b926049, H100", "sglang 0.5.17, H100")
MS = ("hit", "cold")
"""Loads that generate one token."""


def measured(server: str, load: str) -> dict:
    found = rival_rows({"rows": rows("rivals")}) + rival_rows({"rows": rows("serve")})
    return next((row for row in found if (row["server"], row["load"]) == (server, load)), {})


def figure(value: float | None) -> str:
    """One digit after the point below 100; nothing for what was not measured."""
    return "" if value is None else f"{value:,.{0 if value >= 100 else 1}f}"


@pytest.mark.parametrize("load", LOADS)
def test_the_readme_beside_other_servers(load):
    """Tokens per second, or the time to the only token."""
    key = "ttft_p50_ms" if load in MS else "out_tok_s"
    name = next(line[2:].split("|")[0].strip() for line in README.split("\n") if line.startswith(f"| {load}: "))
    assert cells(name, README) == [figure(measured(server, load).get(key)) for server in (*H200, *H100)]


@pytest.mark.parametrize("load", LOADS)
def test_latencies_beside_other_servers(load):
    def cell(row: dict) -> str:
        speed = "" if load in MS else f"{figure(row['out_tok_s'])}; "
        return f"{speed}{figure(row['ttft_p50_ms'])} / {figure(row['ttft_p99_ms'])}"

    assert cells(load) == [cell(measured(server, load)) for server in H200]


@pytest.mark.parametrize("load", ["trunk16k", "sessions", "tot"])
def test_one_machine_beside_another_server(load):
    found = [measured(server, load) for server in H100]
    assert cells(f"{load}, tokens/s") == [f"{figure(row['out_tok_s'])}; {figure(row['ttft_p50_ms'])}" for row in found]
