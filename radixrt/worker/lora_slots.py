"""Which LoRA adapter is in which of the runner's slots, while adapters come and go.

    load   -> read in a thread -> a slot is free          -> put there -> loaded
                               -> one will be (`leaving`) -> waits for it
                               -> none will be            -> refused
    unload -> leaving: no new request gets it -> its last request has ended -> free

A version never changes: an adapter that is replaced is another version of its name, in another slot, and requests that
have the former one finish with it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from pathlib import Path
from typing import TYPE_CHECKING, Any

from radixrt.checkpoint.identity import adapter_identity
from radixrt.checkpoint.lora_modules import FLAG, LoraModule
from radixrt.messages import Adapter, AdapterLoaded

if TYPE_CHECKING:
    from radixrt.worker.plan import Runner

log = logging.getLogger("radixrt.worker")

MAX_ERROR_CHARS = 1000
"""Errors name what an adapter's files have in the wrong place, which can be of any size."""

READ_SECONDS = 300.0
"""The longest that reading an adapter's files may take: a network's file system may not answer."""

Key = tuple[str, int]
"""Name and version."""


class AdapterSlots:
    """The slots of a runner: those of `names` hold version 0 of these from the start, and there are `slots` in all.
    With 0 slots nothing can be loaded."""

    def __init__(self, runner: Runner, names: Sequence[str], slots: int) -> None:
        self._runner = runner
        self.numbers: dict[Key, int] = {(name, 0): number for number, name in enumerate(names)}
        """The slots of loaded adapters. Must not be modified."""
        self._paths: dict[Key, str] = {}
        self._free = list(range(len(names), slots))
        self._leaving: set[int] = set()
        self._loading: deque[tuple[Adapter, Future[Any]]] = deque()
        """The first one is being read, or was."""
        self._read_until = 0.0
        """When reading it is given up, by time.monotonic()."""

    @property
    def loaded(self) -> list[Adapter]:
        """The adapters that requests can have."""
        return [Adapter(name, version, self._paths.get((name, version), "")) for name, version in self.numbers]

    def load(self, adapter: Adapter) -> None:
        """Load an adapter: its AdapterLoaded is among the next that `take` returns."""
        if any(adapter == other for other, _ in self._loading):
            return
        self._loading.append((adapter, Future()))
        if len(self._loading) == 1:
            self._read_first()

    def _read_first(self) -> None:
        """Read the first adapter, in a thread of its own, which may never end."""
        if not self._loading:
            return
        adapter, read = self._loading[0]
        self._read_until = time.monotonic() + READ_SECONDS
        if (adapter.name, adapter.version) in self.numbers:  # a reply was lost
            read.set_result(None)
        else:
            threading.Thread(target=self._read, args=(adapter, read), name="adapters", daemon=True).start()

    def _read(self, adapter: Adapter, read: Future[Any]) -> None:
        try:
            content = self._runner.read_adapter(LoraModule(adapter.name, adapter.path))
            identity = "" if self._runner.disk is None else adapter_identity(Path(adapter.path))
        except BaseException as error:
            with contextlib.suppress(InvalidStateError):
                read.set_exception(error)
        else:
            with contextlib.suppress(InvalidStateError):  # it came too late
                read.set_result((content, identity))

    def unload(self, name: str, version: int) -> None:
        """From now on no new request can have it."""
        if (number := self.numbers.pop((name, version), None)) is not None:
            self._paths.pop((name, version), None)
            if self._runner.disk is not None:
                self._runner.disk.unloaded((name, version))
            self._leaving.add(number)

    def __bool__(self) -> bool:
        """Whether adapters are being loaded: `take` is to be called now and then."""
        return bool(self._loading)

    def is_ready(self, used: Callable[[], set[int]]) -> bool:
        """Whether `take` has something to do. `used` returns the numbers of the adapters that requests have."""
        if not self._loading:
            return False
        adapter, read = self._loading[0]
        if not read.done() and time.monotonic() > self._read_until:
            with contextlib.suppress(InvalidStateError):
                read.set_exception(ValueError(f"{adapter.name}: reading it took more than {READ_SECONDS:.0f} s"))
        if not read.done():
            return False
        if (adapter.name, adapter.version) in self.numbers or read.exception() is not None:
            return True  # it needs no slot
        if not self._free and self._leaving:
            self._free = sorted(self._leaving - used())
            self._leaving.difference_update(self._free)
        return bool(self._free) or not self._leaving

    def take(self) -> AdapterLoaded:
        """Put the next one into a slot, or refuse it. No step may be in flight."""
        adapter, read = self._loading.popleft()
        error = self._put(adapter, read)
        self._read_first()
        return AdapterLoaded(adapter, error if len(error) <= MAX_ERROR_CHARS else error[: MAX_ERROR_CHARS - 3] + "...")

    def _put(self, adapter: Adapter, read: Future[Any]) -> str:
        """Returns why it cannot be loaded; "" if it is."""
        key = adapter.name, adapter.version
        if key in self.numbers:
            return ""
        try:
            content, identity = read.result()
            if not self._free:
                raise ValueError(f"{adapter.name}: no slot is free")
            self._runner.put_adapter(self._free[0], LoraModule(adapter.name, adapter.path), content)
        except ValueError as error:
            return str(error).removeprefix(f"{FLAG} ")
        except Exception as error:
            log.exception("adapter %s cannot be loaded", adapter.name)
            return f"{adapter.name}: {error or type(error).__name__}"
        self.numbers[key] = self._free.pop(0)
        self._paths[key] = adapter.path
        if self._runner.disk is not None:
            self._runner.disk.loaded(key, identity)
        return ""

    def close(self) -> None:
        """Forget what is being read."""
        self._loading.clear()
