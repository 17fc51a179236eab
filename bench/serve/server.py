"""Starts `radixrt serve`, and queries servers."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from bench.serve.endpoint import split_url

POLL_SECONDS = 0.05
STOP_SECONDS = 30.0
BUSY_METRIC = "radixrt_worker_busy_seconds_total"
"""A counter of each worker at /metrics: seconds that its device spent on steps."""


def get(url: str, path: str, api_key: str = "") -> tuple[int, bytes]:
    """GET `path`, without a proxy. Returns (status, body). Raises OSError or HTTPException if the server does not
    respond."""
    host, port, before = split_url(url)
    connection = http.client.HTTPConnection(host, port, timeout=10)
    try:
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        connection.request("GET", before + path, headers=headers)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def model_name(url: str, api_key: str) -> str:
    """The first model that the server lists."""
    status, body = get(url, "/v1/models", api_key)
    if status != 200:
        raise RuntimeError(f"/v1/models answered {status}; name the model with --model")
    return json.loads(body)["data"][0]["id"]


def max_model_len(url: str, api_key: str) -> int | None:
    """The longest context of the first model that the server lists; None if it does not say."""
    status, body = get(url, "/v1/models", api_key)
    return json.loads(body)["data"][0].get("max_model_len") if status == 200 else None


def busy_seconds(url: str, api_key: str) -> list[float] | None:
    """BUSY_METRIC of each worker; None if the server does not have it."""
    status, body = get(url, "/metrics", api_key)
    found = re.findall(rf"^{BUSY_METRIC}(?:{{[^}}]*}})? (\S+)", body.decode(), re.MULTILINE) if status == 200 else []
    return [float(value) for value in found] or None


def idle_share(before: list[float] | None, after: list[float] | None, seconds: float) -> float | None:
    """The share of `seconds` in which devices had no step, averaged over workers; None if it is not known."""
    if before is None or after is None or len(before) != len(after):
        return None
    return 1 - (sum(after) - sum(before)) / len(after) / seconds


def read_config(model: str) -> dict[str, Any]:
    """Read config.json, given its path or its folder. For a vision model, returns the part of the language model."""
    path = Path(model)
    config = json.loads((path / "config.json" if path.is_dir() else path).read_text())
    return config.get("text_config", config)


# ---------------------------------------------------------------- radixrt itself


@contextmanager
def radixrt_serve(model: str, flags: Sequence[str], timeout: float, kill: bool = False) -> Iterator[tuple[str, float]]:
    """Run `radixrt serve`, and stop it in the end, or `kill` all its processes. Yields (URL, seconds until it was
    healthy)."""
    port = free_port()
    # These flags come last and so take precedence: stacks on one machine must not share addresses.
    own = ["--host", "127.0.0.1", "--port", str(port), "--client-address", f"tcp://127.0.0.1:{free_port()}"]
    began = time.perf_counter()
    # In a session of its own, so that Ctrl-C reaches only this process, which then stops the server.
    process = subprocess.Popen([sys.executable, "-m", "radixrt", "serve", model, *flags, *own], start_new_session=True)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_healthy(url, process, began + timeout)
        yield url, time.perf_counter() - began
    finally:
        if kill:
            kill_all(process)
        else:
            stop(process)


def free_port() -> int:
    """A TCP port of this machine on which nothing listens."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def wait_healthy(url: str, process: subprocess.Popen[bytes], deadline: float) -> None:
    """Wait until /health has status 200. Raises RuntimeError if the process ends before, or at `deadline`."""
    while not healthy(url):
        if process.poll() is not None:
            raise RuntimeError(f"radixrt serve ended with code {process.returncode} while starting")
        if time.perf_counter() > deadline:
            raise RuntimeError("radixrt serve was not healthy in time")
        time.sleep(POLL_SECONDS)


def healthy(url: str) -> bool:
    try:
        return get(url, "/health")[0] == 200
    except (OSError, http.client.HTTPException):
        return False


def stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def kill_all(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL to a process and to all that it has started."""
    for pid in _family(process.pid):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def _family(pid: int) -> list[int]:
    children = [child for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()]
    return [pid, *(one for child in children for one in _family(int(child)))]
