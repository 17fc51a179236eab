"""The process of a rank above 0: python -m radixrt.worker.parallel.follower, with its RankConfig on stdin."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sys
import threading
from multiprocessing.connection import Connection

import msgspec

from radixrt.worker.parallel.group import leave
from radixrt.worker.parallel.tensor_parallel import RankConfig, follow


def _end_with_rank_0(folder: str) -> None:
    """End this process when stdin closes, even while it waits on the device."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def main() -> int:
    config = msgspec.json.decode(sys.stdin.buffer.readline(), type=RankConfig)
    threading.Thread(target=_end_with_rank_0, args=(config.folder,), name="rank-0", daemon=True).start()
    form = f"%(asctime)s %(levelname).1s %(name)s, rank {config.rank}: %(message)s"
    logging.basicConfig(level="WARNING", format=form, stream=sys.stderr)
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from radixrt.worker.load.runner import load_rank

    try:
        runner = load_rank(config.worker, config.rank, config.folder)
    except ValueError as error:
        logging.error("%s", error)
        return 1
    try:
        with contextlib.suppress(EOFError):
            pipes = Connection(config.pipe, writable=False), Connection(config.answers, readable=False)
            follow(runner, *pipes)
        runner.close()
        leave()
    finally:
        shutil.rmtree(config.folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
