"""Setup and fixtures for all tests."""

from __future__ import annotations

import gc
import os
import re
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from radixrt.process.gc_tuning import settle

os.environ.setdefault("OMP_NUM_THREADS", "1")
# By default OpenMP's threads spin while they wait: if other processes use the cores, a step of a small model takes ten
# times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# In the background of a shell, SIGINT is ignored, and child processes would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

from tests import interpreter  # noqa: E402  (torch reads the environment when imported)

# No time limits for examples: they depend on the machine, and the first one includes building Hypothesis' tables.
settings.register_profile("radixrt", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("radixrt")


def pytest_configure(config: pytest.Config) -> None:
    """Hide GPUs, so that tests are the same on every machine, unless `tests/gpu` or the marker `gpu` is selected."""
    if not _asks_for_gpu(config):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    interpreter.prepare()


def _asks_for_gpu(config: pytest.Config) -> bool:
    folder = config.rootpath / "tests" / "gpu"
    paths = [config.invocation_params.dir / argument.split("::")[0] for argument in config.args]
    marked = re.search(r"(?<!not )\bgpu\b", config.getoption("markexpr"))
    return bool(marked) or any(path.resolve().is_relative_to(folder) for path in paths)


def pytest_collection() -> None:
    gc.disable()


def pytest_collection_finish() -> None:
    """Exclude all that was imported from garbage collections, which would only cost time."""
    gc.enable()
    settle()


def pytest_unconfigure() -> None:
    """Let garbage be collected at exit: otherwise Triton's modules print warnings."""
    gc.unfreeze()


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder with recorded traces, transcripts and tokenizers. Tests that use it are skipped if there is none."""
    folder = Path(__file__).resolve().parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("no shared/data beside the checkout")
    return folder
