"""The router as a process of its own, or as a thread of another."""

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
    """The router process: serve until SIGTERM or SIGINT. ValueError or OSError where it cannot start."""

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
    """A router on an event loop of its own thread, serving when made (or raising why it cannot). `stop` ends it."""

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
