"""Fixtures that every area uses."""

from __future__ import annotations

import gc
import os
import re
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from radixrt.garbage import settle

os.environ.setdefault("OMP_NUM_THREADS", "1")
# A CPU worker that is alone takes all cores. Where something else needs one, threads that spin for each other make a
# step of a small model ten times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# In the background of a shell, Ctrl-C is ignored; and so it would be by all that the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

from tests import interpreter  # noqa: E402  (torch reads the environment when imported)

# How long an example takes says something of the machine, and the first text of all makes Hypothesis' own tables.
settings.register_profile("radixrt", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("radixrt")


def pytest_configure(config: pytest.Config) -> None:
    """Tests are the same on every machine: a GPU is seen by those who ask for it, by `tests/gpu` or by the marker."""
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
    """All that the tests import is there: a garbage collection that looks at it, again and again, finds nothing."""
    gc.enable()
    settle()


def pytest_unconfigure() -> None:
    """Modules of Triton complain of what nobody collects at the end."""
    gc.unfreeze()


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder with recorded traces, transcripts and tokenizers; tests that read it skip where it is absent."""
    folder = Path(__file__).resolve().parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("no shared/data beside the checkout")
    return folder
