"""The front-end process: the application on uvicorn. Several front ends may share a port."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import threading
from collections.abc import Iterator
from types import FrameType

import uvicorn
import uvloop

from radixrt.config import FrontendConfig, RouterConfig, http_url
from radixrt.frontend.app import Frontend
from radixrt.frontend.http.protocol import PatientProtocol
from radixrt.frontend.http.unread import Unread
from radixrt.process.gc_tuning import settle
from radixrt.process.open_files import ConnectionLimit, max_connections
from radixrt.process.ports import bind_http, cannot_listen, check_host
from radixrt.process.shutdown import Ending, Pulse
from radixrt.process.subprocesses import tell_parent
from radixrt.process.tls import tls_context
from radixrt.router.server.loop import RouterServer
from radixrt.tokens import TextService
from radixrt.wire.keys import is_private

log = logging.getLogger("radixrt.frontend")
BACKLOG = 2048
GRACE_SECONDS = 1
"""How long clients may read the end of their answers when the process ends although some are not finished."""


def run(config: FrontendConfig, pulse: Pulse | None = None) -> None:
    """Serve until SIGTERM or SIGINT. Raises ValueError or OSError if the server cannot start."""
    with TextService.load(config) as text, listen(config) as sock:
        server = make_server(config, text, pulse)
        settle()
        server.run([sock])


def run_with_router(config: RouterConfig, pulse: Pulse | None = None) -> None:
    """Run a router and its front end, `config.http`, on one event loop, which saves messages between processes. Serve
    until SIGTERM or SIGINT, and then until no request is in flight (see `shutdown`). Raises ValueError or OSError if
    they cannot start."""
    assert config.http is not None
    router = RouterServer(config)
    with router.text, listen(config.http) as sock, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        server = Server(Frontend(config.http, router.text, router), config.shutdown_timeout, pulse, router)
        settle()
        runner.run(_serve_both(router, server, sock))


async def _serve_both(router: RouterServer, server: Server, sock: socket.socket) -> None:
    """Serve until the front end, which handles signals, is told to stop, or one of the two fails."""
    stop, ready = asyncio.Event(), asyncio.Event()
    routing = asyncio.create_task(router.run(stop, ready.set))

    def end(_: object) -> None:
        server.should_exit = True
        ready.set()

    routing.add_done_callback(end)
    await ready.wait()
    try:
        if not routing.done():
            tell_parent(router.config.tells, sock.getsockname()[1])
            await server.serve([sock])
    finally:
        stop.set()
        await routing


class _AsOurs(logging.Filter):
    """Logs uvicorn's messages under our name. Its warnings become debug messages: they are about malformed requests,
    which anybody may send."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.name = log.name
        if record.levelno == logging.WARNING:
            record.levelno, record.levelname = logging.DEBUG, "DEBUG"
        return log.isEnabledFor(record.levelno)


_as_ours = _AsOurs()


class Server(uvicorn.Server):
    """A uvicorn server that on a signal finishes the requests in flight, for up to `seconds`, and returns normally.
    Meanwhile the `router` on its event loop refuses new ones; without one it does not listen any more. Raises
    ValueError for a TLS certificate or key that cannot be used."""

    def __init__(
        self,
        frontend: Frontend,
        seconds: float = 0.0,
        pulse: Pulse | None = None,
        router: RouterServer | None = None,
    ) -> None:
        super().__init__(
            uvicorn.Config(
                frontend.app,
                interface="asgi3",
                loop="uvloop",
                http=PatientProtocol,
                ws="none",
                lifespan="on",
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                date_header=False,
                proxy_headers=False,
                timeout_keep_alive=60,
                timeout_graceful_shutdown=GRACE_SECONDS,
            )
        )
        logging.getLogger("uvicorn.error").addFilter(_as_ours)
        self.server_state.unread = Unread()  # type: ignore[attr-defined]
        self.server_state.connection_limit = ConnectionLimit(max_connections())  # type: ignore[attr-defined]
        self.config.load()
        self.config.ssl = tls_context(frontend.config)
        self._frontend = frontend
        self._router = router
        self._ending = Ending(seconds, self._drain, self._is_idle, pulse)

    def _is_idle(self) -> bool:
        return not self.server_state.tasks and (self._router is None or self._router.idle)

    def _drain(self) -> None:
        if self._router is not None:
            self._router.drain()
        else:
            self._close_listeners()

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second."""
        if self._ending.look():
            self.should_exit = True
        return await super().on_tick(counter)

    def _close_listeners(self) -> None:
        """Let other front ends that share the port, if there are any, have all new connections."""
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal handler."""
        self._ending.told()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._frontend.close()
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's, but without raising the signal again at the end, which would kill the process."""
        with super().capture_signals():
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGUSR1, self._ending.asked)
            yield
            self._captured_signals.clear()


def make_server(config: FrontendConfig, text: TextService, pulse: Pulse | None = None) -> Server:
    return Server(Frontend(config, text), config.shutdown_timeout, pulse)


def listen(config: FrontendConfig) -> socket.socket:
    """A listening socket. Raises ValueError for an address beyond loopback without API keys, and OSError if the port is
    taken by anything but front ends that share it."""
    check_host(config)
    sock = bind_http(config.host, config.port, shared=config.shares_port)
    try:
        sock.listen(BACKLOG)
    except OSError as error:  # if two bind a port at the same time, `listen` fails for the later one
        sock.close()
        raise cannot_listen(error, config.host, config.port) from None
    sock.setblocking(False)
    if (key := config.ssl_keyfile or config.ssl_certfile) and not is_private(key):
        log.warning("%s, the TLS private key, can be read by others than its owner (chmod 600)", key)
    log.info("listening on %s", http_url(config, sock.getsockname()[1]))
    return sock


class FrontendThread:
    """A front end in a thread of this process. It listens when the constructor returns; `url` is its address, `stop`
    ends it. With port 0 it takes a free one."""

    def __init__(self, config: FrontendConfig, text: TextService | None = None) -> None:
        self._text = text or TextService.load(config)
        self._owns_text = text is None
        self._server = make_server(config, self._text)
        self._socket = listen(config)
        self.url = http_url(config, self._socket.getsockname()[1])
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), name="frontend")
        self._thread.start()

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()
        if self._owns_text:
            self._text.close()
