"""Rows of the index, believed only where their digests say so."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from radixrt.worker.disk.block import Block
from radixrt.worker.disk.index import Segment
from radixrt.worker.disk.seals import SEAL_BYTES, BadSeal, Seals
from radixrt.worker.disk.tasks import Place

_PROGRESS = 4096


class Loader:
    """Of one store. `progress` is called now and then."""

    def __init__(self, seals: Seals, progress: Callable[[], None]) -> None:
        self._seals = seals
        self._progress = progress

    def names(self, rows: list[tuple[int, bytes, bytes, bytes]]) -> dict[int, str]:
        """Namespaces by id, of this store's key."""
        names = {}
        for id, digest, name, key_name in rows:
            try:
                if key_name == self._seals.key_name:
                    names[id] = self._seals.show(name, digest).decode()
            except (BadSeal, UnicodeDecodeError, TypeError):
                continue
        return names

    def take(
        self, rows: list[tuple], names: Mapping[int, str], places: dict[int, Place], segments: Mapping[int, Segment]
    ) -> tuple[list[Block], list[int]]:
        """Rows of `Index.rows`, parents first, into `places`. Returns the blocks and the numbers of bad rows."""
        seals = self._seals
        roots: dict[int, bytes] = {}
        blocks: list[Block] = []
        bad: list[int] = []
        for done, row in enumerate(rows):
            if done % _PROGRESS == 0:
                self._progress()
            number, kind, namespace, parent, start, hidden, value, path, segment, offset, nbytes, seal = row
            try:
                if parent is None:
                    before = roots.get(namespace)
                    if before is None:
                        before = roots[namespace] = seals.root(names[namespace])
                else:
                    before = places[parent].path
                ids = seals.show(hidden, path) if seals.encrypted else hidden
                fine = seals.path(before, kind, start, ids) == path and segment in segments and len(seal) == SEAL_BYTES
                if not fine or nbytes <= 0 or offset < 0 or len(ids) % 4:
                    raise BadSeal
                block = Block(number, kind, names[namespace], parent, start, ids, float(value), nbytes)
            except (BadSeal, KeyError, TypeError, ValueError, OverflowError):
                bad.append(number)
                continue
            places[number] = Place(segment, offset, nbytes, seal, path)
            blocks.append(block)
        return blocks, bad
