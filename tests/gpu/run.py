"""Runs the tests that need a GPU in several processes that share it, and writes down what came of them.

python -m tests.gpu.run [--processes 4] [--ranks] [--out FILE] [PYTEST'S ARGUMENTS]

FlashInfer's kernels are compiled once, side by side, while the first tests run, which do not need them. Each process
may allocate an equal share of the GPU's memory (see conftest.py). --ranks: the tests of several GPUs instead, one after
the other.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch

from radixrt.worker.cuda.flashinfer_builds import BuildError, KernelBuilds, PrefillKernels, SamplingKernels, find_specs

ROOT = Path(__file__).parents[2]
RESULTS = "bench/results"
OF_SEVERAL_GPUS = ("tests/gpu/test_ranks.py", "tests/gpu/test_peers.py")
KERNELS = (
    "kernels products experts packed_experts int4 delta mamba latent mixed_heads sparse selection host_pool predicting "
    "router full_heads sampler scaled lora"
).split()
"""tests/worker/cuda/test_*.py whose tests run on a GPU where there is one; others are for the interpreter."""
CHECKED = ("torch", "triton", "flashinfer-python", "transformers", "xgrammar")
"""Packages whose versions are written down."""
SHOWN = 300
"""Characters of an error that are."""


class Recorder:
    """A plugin of pytest, in the process that the others report to: `found()` is what came of the tests."""

    def __init__(self) -> None:
        self._files: dict[str, dict[str, Any]] = {}
        self._failures: list[dict[str, str]] = []
        self._reasons: dict[str, int] = {}
        self._failed: set[str] = set()
        self._began = time.monotonic()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        path = report.nodeid.partition("::")[0]
        file = self._files.setdefault(path, {"passed": 0, "failed": 0, "skipped": 0, "seconds": 0.0})
        file["seconds"] += report.duration
        if report.failed:  # also of what ends a test that has passed: it counts once
            self._failures.append({"test": report.nodeid, "when": report.when or "", "error": _error_of(report)})
            file["passed"] -= report.when == "teardown" and report.nodeid not in self._failed
            file["failed"] += report.nodeid not in self._failed
            self._failed.add(report.nodeid)
        elif report.skipped:
            file["skipped"] += 1
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            reason = reason.removeprefix("Skipped: ")[:SHOWN]
            self._reasons[reason] = self._reasons.get(reason, 0) + 1
        elif report.when == "call":
            file["passed"] += 1

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and not any(one["test"] == report.nodeid for one in self._failures):
            self._failures.append({"test": report.nodeid, "when": "collect", "error": _error_of(report)})

    def found(self) -> dict[str, Any]:
        files = {path: file | {"seconds": round(file["seconds"], 1)} for path, file in sorted(self._files.items())}
        total = {name: sum(file[name] for file in files.values()) for name in ("passed", "failed", "skipped")}
        return {
            "seconds": round(time.monotonic() - self._began, 1),
            **total,
            "files": files,
            "failures": self._failures,
            "skipped_because": self._reasons,
        }


def _error_of(report: pytest.TestReport | pytest.CollectReport) -> str:
    """The message of what was raised, or the last line of what is said of it."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else (str(report.longrepr).strip().splitlines() or [""])[-1]
    return text[:SHOWN]


def machine() -> dict[str, Any]:
    """What the tests ran on, and with what."""
    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    versions = {}
    for name in CHECKED:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    asked = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": asked.stdout.strip() or None,
        "devices": devices,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "versions": versions,
    }


def begin_builds() -> KernelBuilds | None:
    """Begin to compile FlashInfer's kernels that tests call."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        return None
    heads = [(128, False), (128, True), (64, False), (256, False)]
    wanted = [PrefillKernels("fa3", torch.bfloat16, head_dim, window) for head_dim, window in heads]
    try:
        return KernelBuilds(find_specs([wanted[0], SamplingKernels(), *wanted[1:]]))
    except Exception as error:  # the tests will say what is missing
        print(f"no kernels are compiled ahead: {type(error).__name__}: {error}")
        return None


def compiled(builds: KernelBuilds | None) -> dict[str, float | str | None]:
    """Seconds, or what went wrong; None: not yet."""
    found: dict[str, float | str | None] = {}
    for kernels in builds.compiling if builds else ():
        try:
            found[str(kernels)] = round(builds.wait(kernels), 1) if builds and builds.is_done(kernels) else None
        except BuildError as error:
            found[str(kernels)] = str(error)
    return found


def show(found: dict[str, Any]) -> str:
    """The same as a table."""
    lines = [f"{'passed':>7} {'failed':>7} {'skipped':>7} {'seconds':>8}"]
    for path, file in found["files"].items():
        lines.append(f"{file['passed']:7} {file['failed']:7} {file['skipped']:7} {file['seconds']:8.1f}  {path}")
    lines.append(f"{found['passed']:7} {found['failed']:7} {found['skipped']:7} {found['seconds']:8.1f}  in all")
    lines += [f"FAILED {each['test']} ({each['when']}): {each['error']}" for each in found["failures"]]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--ranks", action="store_true", help="the tests of several GPUs")
    parser.add_argument("--out", help=f"default: {RESULTS}/gpu_tests.json, or gpu_tests_ranks.json")
    args, others = parser.parse_known_args(arguments)
    paths = [path for path in others if path.partition("::")[0].endswith(".py")]
    if args.ranks:
        paths, processes = [*OF_SEVERAL_GPUS], 1
    else:
        processes = args.processes
        kernels = [f"tests/worker/cuda/test_{name}.py" for name in KERNELS]  # first: they do not need FlashInfer
        others += [] if paths else [*kernels, "tests/gpu", *(f"--ignore={path}" for path in OF_SEVERAL_GPUS)]
    if processes > 1 and importlib.util.find_spec("xdist") is None:
        print("pytest-xdist is not installed (make gpu-wheels): one process runs all")
        processes = 1
    spread = ["-n", str(processes), "--dist", "load"] if processes > 1 else []
    before, recorder = machine(), Recorder()
    builds = begin_builds()
    flags = ["-rs", "-p", "no:cacheprovider", "-o", "timeout=600"]
    code = pytest.main([*flags, *spread, *others, *(paths if args.ranks else [])], plugins=[recorder])
    found = before | {"processes": processes, "ended": pytest.ExitCode(code).name.lower(), "arguments": others}
    found |= {"compiled": compiled(builds)} | recorder.found()
    out = ROOT / (args.out or f"{RESULTS}/gpu_tests{'_ranks' * args.ranks}.json")
    out.write_text(json.dumps(found, indent=1) + "\n")
    print(show(found), f"written to {out}", sep="\n")
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
