"""Streams of a GPU that is not there: copies and launches are queued, and run in any order that events allow. What is
not ordered by events but should be shows as a wrong result."""

from __future__ import annotations

import contextlib
import random
from collections import deque
from collections.abc import Callable, Iterator

import pytest
import torch
from torch.overrides import TorchFunctionMode


class Event:
    """As torch.cuda.Event: a stream that waits for it waits for what was recorded last."""

    def __init__(self) -> None:
        self.recorded: list[bool] | None = None

    def record(self, stream: Stream) -> None:
        self.recorded = done = [False]
        stream.queue.append((lambda: done.__setitem__(0, True), None))


class Stream:
    """A queue of (what is done, what has to be done before by others)."""

    def __init__(self, *_: object) -> None:
        self.queue: deque[tuple[Callable[[], object], list[bool] | None]] = deque()

    def wait_event(self, event: Event) -> None:
        if event.recorded is not None:
            self.queue.append((lambda: None, event.recorded))

    @property
    def is_ready(self) -> bool:
        return bool(self.queue) and (self.queue[0][1] is None or self.queue[0][1][0])


class Device(TorchFunctionMode):
    """Queues `Tensor.copy_` on the current stream."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.steps = self.current = Stream()
        self.streams = [self.steps]
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "Stream", self._make)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _: self.current)
        monkeypatch.setattr(torch.cuda, "stream", self._use)

    def _make(self, *_: object) -> Stream:
        self.streams.append(Stream())
        return self.streams[-1]

    @contextlib.contextmanager
    def _use(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def launch(self, work: Callable[[], object]) -> None:
        self.current.queue.append((work, None))

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is not torch.Tensor.copy_:
            return func(*args, **(kwargs or {}))
        self.launch(lambda: func(*args))
        return args[0]

    @torch.inference_mode()
    def run(self, rng: random.Random, most: int = 1 << 30) -> None:
        """Do up to `most` things, of any stream that need not wait. One of the streams gets on faster than others."""
        fast = rng.choice(self.streams)
        for _ in range(most):
            ready = [stream for stream in self.streams if stream.is_ready]
            if not ready:
                break
            stream = fast if fast in ready and rng.random() < 0.9 else rng.choice(ready)
            work, _ = stream.queue.popleft()
            work()
