"""Runs the router as a process, or in a thread of another process."""

from __future__ import annotations

import asyncio
import signal
import threading
from concurrent.futures import Future

import uvloop

from radixrt.config import RouterConfig
from radixrt.process.gc_tuning import settle
from radixrt.process.shutdown import POLL_SECONDS as SHUTDOWN_POLL_SECONDS
from radixrt.process.shutdown import Ending, Pulse
from radixrt.process.subprocesses import tell_parent
from radixrt.router.server.loop import RouterServer
from radixrt.tokens import TextService


def run(config: RouterConfig, pulse: Pulse | None = None) -> None:
    """Serve until SIGTERM or SIGINT, and then until no request is in flight (see `shutdown`). Raises ValueError or
    OSError if the router cannot start."""

    async def serve() -> None:
        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        ending = Ending(config.shutdown_timeout, server.drain, lambda: server.idle, pulse)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, ending.told)
        loop.add_signal_handler(signal.SIGUSR1, ending.asked)

        def look() -> None:
            if ending.look():
                stop.set()
            else:
                loop.call_later(SHUTDOWN_POLL_SECONDS, look)

        def on_ready() -> None:
            tell_parent(config.tells)
            look()

        await server.run(stop, on_ready)

    server = RouterServer(config)
    settle()
    with server.text, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve())


class RouterThread:
    """A router in a thread with an event loop of its own. It serves when the constructor returns, which raises if it
    cannot start. `stop` ends it."""

    def __init__(self, config: RouterConfig, text: TextService | None = None) -> None:
        self.server = RouterServer(config, text)
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
