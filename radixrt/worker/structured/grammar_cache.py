"""The compiled grammars of all tenants, within a bound of bytes. No tenant is given what another one sent: it could
tell from the time that it was sent before."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from radixrt.messages import Grammar
from radixrt.worker.structured.fair import Job

Key = tuple[str, Grammar]
"""(tenant, grammar); tenant "" for grammars without content of any tenant."""
ENTRY_BYTES = 2048
"""About what a cached grammar takes beside its text and its compiled form."""


class GrammarCache:
    """Jobs that compile grammars, those used last. If they take more than `limit` bytes, the tenant with the most loses
    those that it used least recently. `size(job)`: bytes of a finished job's result."""

    def __init__(self, limit: int, size: Callable[[Job], int]) -> None:
        self._limit = limit
        self._size = size
        self._jobs: dict[str, OrderedDict[Grammar, Job]] = {}
        """By tenant and grammar, the one used last at the end; none is empty."""
        self._sizes: dict[Key, int] = {}
        """Bytes of each that is compiled."""
        self._bytes: dict[str, int] = {}
        """Their sum by tenant."""
        self._undone: list[Key] = []
        """Those whose size is not counted yet, as they may still be compiling."""

    def __len__(self) -> int:
        return sum(map(len, self._jobs.values()))

    def get(self, key: Key) -> Job | None:
        """The job of a grammar, which is now the last used one."""
        jobs = self._jobs.get(key[0])
        if jobs is None or key[1] not in jobs:
            return None
        jobs.move_to_end(key[1])
        return jobs[key[1]]

    def add(self, key: Key, job: Job) -> None:
        """Add a new job, after room was made."""
        while self.nbytes > self._limit:
            tenant = max(self._bytes, key=self._bytes.__getitem__)
            self.drop((tenant, next(one for one in self._jobs[tenant] if (tenant, one) in self._sizes)))
        self._jobs.setdefault(key[0], OrderedDict())[key[1]] = job
        self._undone.append(key)

    def drop(self, key: Key) -> None:
        """Drop a job."""
        tenant, grammar = key
        del self._jobs[tenant][grammar]
        if not self._jobs[tenant]:
            del self._jobs[tenant]
        if key in self._sizes:
            self._bytes[tenant] -= self._sizes.pop(key)
            if not self._bytes[tenant]:
                del self._bytes[tenant]
        else:
            self._undone.remove(key)

    @property
    def nbytes(self) -> int:
        """Memory of the grammars that are compiled, with their texts."""
        undone, self._undone = self._undone, []
        for key in undone:
            tenant, grammar = key
            job = self._jobs[tenant][grammar]
            if job.future.done():
                self._sizes[key] = size = ENTRY_BYTES + len(grammar.text) + self._size(job)
                self._bytes[tenant] = self._bytes.get(tenant, 0) + size
            else:
                self._undone.append(key)
        return sum(self._bytes.values())
