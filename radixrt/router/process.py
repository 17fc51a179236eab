"""Runs the router as a process, or in a thread of another process."""

from __future__ import annotations

import asyncio
import signal
import threading
from concurrent.futures import Future

import uvloop

from radixrt.children import tell_parent
from radixrt.config import RouterConfig
from radixrt.garbage import settle
from radixrt.report import Report
from radixrt.router.loop import RouterServer
from radixrt.router.tokens import TextService


def run(config: RouterConfig) -> None:
    """Serve until SIGTERM or SIGINT. Raises ValueError or OSError if the router cannot start."""

    async def serve() -> None:
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        await server.run(stop, lambda: tell_parent(config.tells))

    server = RouterServer(config)
    settle()
    with server.text, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve())


class RouterThread:
    """A router in a thread with an event loop of its own. It serves when the constructor returns, which raises if it
    cannot start. `stop` ends it."""

    def __init__(self, config: RouterConfig, text: TextService | None = None, report: Report | None = None) -> None:
        self.server = RouterServer(config, text, report)
        self._own_text = text is None
        self._ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._main, name="router")
        self._thread.start()
        try:
            self._ready.result()
        except BaseException:
            self.stop()
            raise

    def _main(self) -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(self._serve())
        except BaseException as error:
            if self._ready.done():
                raise
            self._ready.set_exception(error)

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        await self.server.run(self._stop, lambda: self._ready.set_result(None))

    def stop_workers(self) -> None:
        """Tell every worker to stop."""
        self._loop.call_soon_threadsafe(self.server.stop_workers)

    def stop(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        if self._own_text:
            self.server.text.close()
