"""`radixrt serve` as users start it, with a supervisor's view: its log, its processes, and how it ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Self

import httpx
import psutil

from radixrt.client import Client, ServerError
from radixrt.config import RouterConfig
from radixrt.process.ports import free_tcp_address
from tests.chaos.processes import family, zombies
from tests.waiting import eventually

TENANTS = {"red": "key-of-red", "blue": "key-of-blue"}
ADMIN_KEY = "key-of-admin"
READY_SECONDS = 90.0
END_SECONDS = 40.0
"""A stack ends within this time after its router has been killed."""
WORKER_TIMEOUT = 2.0
BAD_LINE = re.compile(
    r"Traceback \(most recent call last\)|never retrieved|Exception ignored|Assertion failed|dumped core"
)
FAKE = ("--fake", "0,0.003", "--check", "--max-total-tokens", "60000", "--max-model-len", "4096")
"""Flags of workers without a model, whose tokens follow a formula, and who assert that each request attends to its own
prefix."""


class Serve:
    """A running `radixrt serve nano`. `start` may be called again after it has ended; the addresses stay the same."""

    def __init__(
        self,
        folder: Path,
        *flags: str,
        workers: int = 3,
        frontends: int = 2,
        keys: bool = True,
        worker_port: bool = False,
    ) -> None:
        """`worker_port`: the worker socket also listens on TCP, where the default is that it does not."""
        folder.mkdir(parents=True, exist_ok=True)
        self.log = folder / "serve.log"
        self.address, self.worker_address = free_tcp_address(), free_tcp_address()
        self.port = int(free_tcp_address().rpartition(":")[2])
        self.url = f"http://127.0.0.1:{self.port}"
        self.workers, self.frontends = workers, frontends
        self.tenants = TENANTS if keys else {"default": ""}
        self._admin_key = ADMIN_KEY if keys else ""
        self._flags = [*flags]
        if worker_port or RouterConfig().worker_address:
            self._flags += ["--worker-address", self.worker_address]
        if keys:
            file = folder / "keys"
            file.write_text("".join(f"{tenant}:{key}\n" for tenant, key in TENANTS.items()))
            admin = folder / "admin"
            admin.write_text(ADMIN_KEY)
            for one in (file, admin):
                one.chmod(0o600)
            self._flags += ["--api-key", f"@{file}", "--admin-api-key", f"@{admin}"]
        self._process: subprocess.Popen[bytes] | None = None
        self._read = 0
        """Bytes of the log before the last start."""

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> Self:
        """Start it, and wait until it is ready."""
        self._read = self.log.stat().st_size if self.log.exists() else 0
        command = [sys.executable, "-m", "radixrt", "serve", "nano", "--workers", str(self.workers)]
        command += ["--api-server-count", str(self.frontends), "--port", str(self.port)]
        command += ["--client-address", self.address, "--worker-timeout", str(WORKER_TIMEOUT), *self._flags]
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
            )
        eventually(lambda: not self.alive or "ready after" in self._news(), READY_SECONDS)
        assert self.alive, f"it did not start: {self._news()[-2000:]}"
        return self

    def _news(self) -> str:
        with self.log.open("rb") as log:
            log.seek(self._read)
            return log.read().decode(errors="replace")

    def processes(self, role: str) -> list[psutil.Process]:
        return family(self.pid)[role]

    def near_address(self) -> str:
        """The Unix socket on which the router listens for the workers of its own machine."""
        (router,) = self.processes("router")
        names = {link.laddr for link in router.net_connections("unix") if link.laddr.startswith("@radixrt-")}
        return f"ipc://{names.pop()}"

    def pids(self) -> set[int]:
        return {process.pid for processes in family(self.pid).values() for process in processes}

    def wait_whole(self, seconds: float = READY_SECONDS) -> None:
        """Wait until all workers and front ends serve."""
        eventually(lambda: self._is_whole(), seconds)

    def _is_whole(self) -> bool:
        assert self.alive, f"the stack has ended: {self._news()[-2000:]}"
        here = family(self.pid)
        if len(here["worker"]) < self.workers or len(here["frontend"]) < (self.frontends if self.frontends > 1 else 0):
            return False
        try:
            answer = httpx.get(f"{self.url}/health", timeout=5.0)
            if answer.status_code != 200:
                return False
            with self.observer() as client:
                return len(client.health()["workers"]) == self.workers
        except (httpx.HTTPError, ServerError, ConnectionError):
            return False

    def observer(self) -> Client:
        """A client that sees the figures of the whole stack, if one may: the administrator's, else a tenant's."""
        key = next(iter(self.tenants.values()))
        if self._admin_key:
            try:
                client = Client(self.address, api_key=self._admin_key)
            except ServerError:
                return Client(self.address, api_key=key)
            try:
                client.metrics()
                return client
            except ServerError:
                client.close()
        return Client(self.address, api_key=key)

    def wait_ended(self, seconds: float = END_SECONDS) -> int:
        """Wait until the process has ended and none of its children is left. Returns its exit code."""
        assert self._process is not None
        return self._process.wait(seconds)

    def stop(self) -> int:
        """SIGTERM, as a supervisor stops it. Returns the exit code; whatever is left after that is killed."""
        assert self._process is not None
        left = [process for processes in family(self.pid).values() for process in processes]
        for process in left:
            if process.is_running():
                process.send_signal(signal.SIGCONT)
        self._process.terminate()
        try:
            return self._process.wait(END_SECONDS)
        finally:
            for process in left:
                if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                    process.kill()
            self._process.wait()

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:  # such as the end of the time for all runs
            self.stop()
            raise

    def __exit__(self, *_exc: object) -> None:
        self.stop()

    # ------------------------------------------------------------ what must hold

    def bad_lines(self) -> list[str]:
        """Lines of the whole log that must not be in it, each with what follows it."""
        lines = self.log.read_text(errors="replace").splitlines()
        return ["\n".join(lines[i : i + 40]) for i, line in enumerate(lines) if BAD_LINE.search(line)]

    def check_idle(self, seconds: float = 30.0, pinned_share: float = 0.0) -> None:
        """Wait until nothing is in flight and all pages are free or evictable, but for a share that may be pinned.
        Fails with what is left."""
        deadline = time.monotonic() + seconds
        with self.observer() as client:
            while left := self._busy(client, pinned_share):
                assert time.monotonic() < deadline, f"not idle after {seconds:.0f} s: {left}"
                time.sleep(0.05)
        assert not zombies(self.pid), "there are zombies"

    @staticmethod
    def _busy(client: Client, pinned_share: float) -> dict[str, object]:
        text, found = client.metrics(), {}
        flight = re.search(r"^radixrt_sequences_in_flight (\S+)", text, re.MULTILINE)
        if flight and float(flight[1]):
            found["in flight"] = float(flight[1])
        for worker in client.health()["workers"]:
            leased = worker["total_pages"] - worker["free_pages"] - worker["evictable_pages"]
            if (
                leased > pinned_share * worker["total_pages"]
                or worker["requests"]
                or worker["running"]
                or worker["waiting"]
            ):
                found[worker["name"]] = worker
        return found
