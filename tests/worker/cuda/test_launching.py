"""How kernels are launched: with what they are known by, and early where the device can."""

from __future__ import annotations

import pytest

from radixrt.worker.cuda.elementwise import launching


class Kernel:
    """Notes how it is launched; gives what it was compiled to."""

    __name__ = "kernel"

    def __init__(self) -> None:
        self.launched: list[tuple] = []
        self.compiled: Kernel | None = None

    def __getitem__(self, grid):
        def launch(*args, **options):
            self.launched.append((grid, args, options))
            return self.compiled

        return launch


@pytest.mark.parametrize("early", [False, True])
def test_early_where_the_device_can(early, monkeypatch):
    monkeypatch.setattr(launching, "launches_early", lambda: early)
    kernel = Kernel()
    launching.launch(kernel, (3,), None, "x", 5, num_warps=2)
    options = {"num_warps": 2} | ({"launch_pdl": True} if early else {})
    assert kernel.launched == [((3,), ("x", 5, early), options)]


def test_again_asks_nothing(monkeypatch):
    monkeypatch.setattr(launching, "launches_early", lambda: True)
    kernel, again = Kernel(), {}
    kernel.compiled = Kernel()
    first = launching.launch(kernel, (3, 1, 1), again, "x", num_warps=2)
    second = launching.launch(kernel, (4, 1, 1), again, "y", num_warps=2)
    assert first is second is kernel.compiled
    assert len(kernel.launched) == 1
    assert kernel.compiled.launched == [((4, 1, 1), ("y", True), {})]


def test_what_is_interpreted_is_not_known_again(monkeypatch):
    monkeypatch.setattr(launching, "launches_early", lambda: False)
    kernel, again = Kernel(), {}
    assert launching.launch(kernel, (3, 1, 1), again, "x") is None
    assert again == {}
