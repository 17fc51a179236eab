"""NVIDIA's load generator, unmodified: its AgentX scenario replays recorded sessions, and reads the server's metrics.

`make test-agents` installs it in an environment of its own.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from radixrt.config import NANO
from tests.frontend.conftest import serving

pytestmark = pytest.mark.agents
FOLDER = Path(os.environ.get("AGENTS_FOLDER") or Path(__file__).parents[2] / ".agents")
CACHED = "vllm:prefix_cache_hits"
SECONDS = 110
"""For the whole run, most of which is its start."""


@pytest.fixture
def aiperf() -> str:
    found = shutil.which("aiperf", path=FOLDER / "aiperf" / "bin") or shutil.which("aiperf")
    if found is None:
        pytest.skip("aiperf is not installed: make test-agents does it")
    return found


def trace(name: str, turns: int) -> dict[str, Any]:
    """A session in the format of kv-cache-tester: each prompt is the one before, and four blocks more."""
    requests = []
    for turn in range(turns):
        blocks = 10 + 4 * turn
        fields = {"t": turn * 1.5, "type": "n", "model": "claude", "in": blocks * 64, "out": 20, "stop": "tool_use"}
        requests.append(fields | {"api_time": 0.5, "think_time": 1.0, "hash_ids": list(range(1, blocks + 1))})
    sizes = {"block_size": 64, "tool_tokens": 256, "system_tokens": 128}
    return {"id": name, "models": ["claude"], "hash_id_scope": "local", "requests": requests} | sizes


@pytest.mark.timeout(SECONDS + 10)
def test_its_agentx_scenario_hits_what_its_theory_says_and_it_knows_the_metrics(aiperf, tmp_path):
    traces = tmp_path / "traces"
    traces.mkdir()
    for name in ("one", "two"):
        (traces / f"{name}.json").write_text(json.dumps(trace(name, 8)))
    out = tmp_path / "out"
    with serving(NANO, fake="0,0.001", workers=1) as frontend:
        command = [aiperf, "profile", "--scenario", "inferencex-agentx-mvp", "--url", frontend.url, "--model", "m"]
        command += ["--tokenizer", str(NANO), "--input-file", str(traces), "--custom-dataset-type", "weka-trace"]
        command += ["--unsafe-override", "--use-server-token-count", "--session-header", "X-Session-ID"]
        command += ["--concurrency", "2", "--benchmark-duration", "12", "--benchmark-grace-period", "5"]
        command += ["--random-seed", "42", "--ui", "none", "--output-artifact-dir", str(out)]
        ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    found = json.loads((out / "profile_export_aiperf.json").read_text())
    assert found["request_count"]["avg"] >= 4 and found["request_error_rate"]["avg"] == 0
    theory, hits = found["theoretical_prefix_cache_hit"]["avg"], found["overall_usage_prompt_cache_read_pct"]["avg"]
    # The theory counts whole blocks, and nothing of the chat's markup.
    assert theory > 50 and theory - 3 < hits < 100
    metrics = json.loads((out / "server_metrics_export.json").read_text())["metrics"]
    counted = {name: metrics[name]["series"][0]["stats"]["total"] for name in ("vllm:prompt_tokens", CACHED)}
    assert counted[CACHED] > 0.5 * counted["vllm:prompt_tokens"] > 0
    assert {"vllm:kv_cache_usage_perc", "sglang:num_running_reqs", "sglang:hicache_host_total_tokens"} <= set(metrics)
