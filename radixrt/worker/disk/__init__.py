"""KV blocks on disk: what outlives memory, the process and a restart.

A **block** is a run of whole rows of one path of tokens, with the block before it as its parent: the unit of writing,
verifying, indexing and evicting. A store knows rows, int32 ids and numbers; pages, tensors and trees are its caller's.

    store = DiskStore(Path("/kv"), size=200 << 30, fingerprint="llama-8b fp8_e4m3 ...")
    for block in store.blocks():               # once, at the start: parents come before their children
        ...
    job = store.write(NewBlock("kv", namespace, parent, start, ids), array, slots)
    job = store.read(number, array, slots, first=0)
    changes = store.poll()                     # in each turn of its loop: jobs that ended, blocks come and gone
    store.close()

No call waits for the disk, except `blocks`, `flush` and `close`, for a bounded time. No call raises what the disk does:
a store that cannot serve (`state`) ends its jobs with `ok` false, says so once in the log, and tries again by itself.
The rows of a job are not to be changed (write) or used (read) until `poll` has returned it.

Several processes may have stores in one folder: each sees what the others wrote of its fingerprint. The ranks of a
tensor-parallel group have a store each, of the same fingerprint, `ranks` and folder: rank 0 writes a block with `write`
and tells the others its number, under which they write their parts with `write_part`. Rank 0's job ends when all have
written, and nobody sees the block before. Each rank reads its own part by the block's number; whether all of them could
is for their caller to find out.

Nothing but `radixrt.worker.disk` reads or writes the folder's files, whose layout is in `segments` and `index`.
"""

from radixrt.worker.disk.block import Block, Changes, Job, NewBlock, StoreState
from radixrt.worker.disk.store import DiskStore

__all__ = ["Block", "Changes", "DiskStore", "Job", "NewBlock", "StoreState"]
