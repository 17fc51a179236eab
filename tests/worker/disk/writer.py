"""A process that writes, deletes and touches blocks until it is killed: python -m tests.worker.disk.writer FOLDER SIZE
SEED. It says when its store is open."""

from __future__ import annotations

import random
import sys
from pathlib import Path

from radixrt.worker.disk import NewBlock
from tests.worker.disk.stores import SPACE, content, ids_of, opened, path_of


def main() -> None:
    folder, size, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    rng = random.Random(seed)
    store = opened(folder, size)
    store.blocks()
    print("open", flush=True)
    chain: list[tuple[int, bytes, int]] = []
    step = 0
    while True:
        step += 1
        if not chain or rng.random() < 0.15:
            chain = []
        parent, before, start = chain[-1] if chain else (None, b"", 0)
        block = NewBlock("kv", SPACE, parent, start, ids_of(seed, step), float(step))
        path = path_of(block, before)
        rows = rng.randint(1, 200)
        job = store.write(block, content(path, rows), range(rows))
        chain.append((job.number, path, start + 2))
        if rng.random() < 0.1:
            store.delete([rng.choice(chain)[0]])
            chain = []
        store.touch([job.number], float(step + rng.randrange(50)))
        while store.backlog > 1 << 20:
            store.flush(0.002)
        store.poll()


if __name__ == "__main__":
    main()
