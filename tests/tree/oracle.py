"""Simple and slow reference implementations of the trees: dicts with one entry for each page's path."""

from __future__ import annotations

from collections import Counter

Path = tuple[int, ...]


UNUSED = 0, -(1 << 31)
"""(uses, priority) of a page that no lease has held."""


class NaiveCache:
    """Reference of RadixTree. `pages[namespace, path]` is [value, last use, uses, priority] of the last page of the
    path. What is evicted first is by `policy`: lru, lfu or priority."""

    def __init__(self, page_size: int, policy: str = "lru") -> None:
        self.page_size = page_size
        self.policy = policy
        self.pages: dict[tuple[str, Path], list[int]] = {}
        self.leases: Counter[tuple[str, Path]] = Counter()
        self.clock = 0

    def prefixes(self, path: Path) -> list[Path]:
        return [path[:end] for end in range(self.page_size, len(path) + 1, self.page_size)]

    def match(self, namespace: str, path: Path) -> Path:
        held: Path = ()
        for prefix in self.prefixes(path):
            if (namespace, prefix) not in self.pages:
                break
            held = prefix
        return held

    def values(self, namespace: str, path: Path) -> list[int]:
        return [self.pages[namespace, prefix][0] for prefix in self.prefixes(path)]

    def touch(self, namespace: str, path: Path) -> None:
        self.clock += 1
        for prefix in self.prefixes(path):
            self.pages[namespace, prefix][1] = self.clock

    def use(self, namespace: str, path: Path, start: int, uses: int, priority: int) -> None:
        for prefix in self.prefixes(path):
            if len(prefix) > start:
                page = self.pages[namespace, prefix]
                page[2:] = page[2] + uses, max(page[3], priority)

    def order(self, page: tuple[str, Path]) -> tuple[int, int]:
        _, last_use, uses, priority = self.pages[page]
        return {"lru": 0, "lfu": uses, "priority": priority}[self.policy], last_use

    def insert(self, namespace: str, path: Path, values: list[int]) -> int:
        present = len(self.match(namespace, path))
        for i, prefix in enumerate(self.prefixes(path)):
            self.pages.setdefault((namespace, prefix), [values[i], 0, *UNUSED])
        self.touch(namespace, path)
        return present

    def leased(self) -> set[tuple[str, Path]]:
        return {(namespace, prefix) for namespace, path in self.leases for prefix in self.prefixes(path)}

    def inner(self) -> set[tuple[str, Path]]:
        return {(namespace, path[: -self.page_size]) for namespace, path in self.pages}

    def evict(self, tokens: int) -> list[int]:
        freed: list[int] = []
        leased = self.leased()
        while len(freed) * self.page_size < tokens:
            inner = self.inner()
            leaves = [page for page in self.pages if page not in inner and page not in leased]
            if not leaves:
                break
            freed.append(self.pages.pop(min(leaves, key=self.order))[0])
        return freed

    def take(self, values: list[int]) -> list[int]:
        """Remove pages with these values, which the tree has evicted in the order of a policy: only leaves, page by
        page. Returns the values that could be removed."""
        freed: list[int] = []
        leased = self.leased()
        while leaves := [p for p in self.pages if self.pages[p][0] in values and p not in self.inner() | leased]:
            freed += [self.pages.pop(leaf)[0] for leaf in leaves]
        return freed

    def forget(self, namespace: str, path: Path, keep: int) -> list[int]:
        freed: list[int] = []
        for prefix in reversed(self.prefixes(self.match(namespace, path))):
            page = (namespace, prefix)
            if len(prefix) <= keep or len(prefix) - self.page_size < keep or page in self.inner() | self.leased():
                break
            freed.append(self.pages.pop(page)[0])
        return freed

    def remove_namespaces(self, prefix: str) -> list[int]:
        leased = self.leased()
        gone = [page for page in self.pages if page[0].startswith(prefix) and page not in leased]
        return [self.pages.pop(page)[0] for page in gone]


class NaiveOwners:
    """Reference of OwnerTree, with one entry per token. A run is (namespace, path to its end, tokens before it)."""

    def __init__(self) -> None:
        self.counts: dict[tuple[str, Path], Counter[int]] = {}
        self.runs: dict[tuple[int, int], tuple[str, Path, int]] = {}

    def prefixes(self, path: Path, start: int) -> list[Path]:
        return [path[:end] for end in range(start + 1, len(path) + 1)]

    def held(self, namespace: str, path: Path) -> int:
        length = 0
        while length < len(path) and (namespace, path[: length + 1]) in self.counts:
            length += 1
        return length

    def add(self, namespace: str, path: Path, owner: int, start: int = 0) -> None:
        for prefix in self.prefixes(path, start):
            self.counts.setdefault((namespace, prefix), Counter())[owner] += 1

    def remove(self, namespace: str, path: Path, owner: int, keep: int = 0) -> None:
        for prefix in self.prefixes(path, keep):
            if (counts := self.counts.get((namespace, prefix))) and owner in counts:
                counts[owner] -= 1
        self.prune()

    def store(self, owner: int, namespace: str, run: int, at: int, parent: int, parent_at: int, ids: Path) -> bool:
        """Returns False, and changes nothing, if the arguments do not agree with the owner's runs."""
        known = self.runs.get((owner, run))
        if at:
            if known is None or len(known[1]) - known[2] != at:
                return False
            namespace, path, above = known
        elif known is not None:
            return False
        elif parent_at:
            upper = self.runs.get((owner, parent))
            if upper is None or upper[0] != namespace or len(upper[1]) - upper[2] < parent_at:
                return False
            path, above = upper[1][: upper[2] + parent_at], upper[2] + parent_at
        else:
            path, above = (), 0
        if not ids:
            return False
        self.add(namespace, path + ids, owner, len(path))
        self.runs[owner, run] = (namespace, path + ids, above)
        return True

    def cut(self, owner: int, run: int, keep: int) -> bool:
        namespace, path, above = self.runs.get((owner, run), ("", (), 0))
        if (owner, run) not in self.runs or len(path) - above < keep:
            return False
        self.remove(namespace, path, owner, above + keep)
        if keep:
            self.runs[owner, run] = (namespace, path[: above + keep], above)
        else:
            del self.runs[owner, run]
        return True

    def remove_owner(self, owner: int) -> None:
        for key in [key for key in self.runs if key[0] == owner]:
            del self.runs[key]
        for counts in self.counts.values():
            counts.pop(owner, None)
        self.prune()

    def prune(self) -> None:
        for key in sorted(self.counts, key=lambda key: -len(key[1])):
            self.counts[key] = +self.counts[key]
            namespace, path = key
            extended = any(n == namespace and len(p) == len(path) + 1 and p[:-1] == path for n, p in self.counts)
            if not self.counts[key] and not extended:
                del self.counts[key]

    def match(self, namespace: str, path: Path) -> dict[int, int]:
        lengths: dict[int, int] = {}
        active: set[int] | None = None
        for length in range(1, self.held(namespace, path) + 1):
            owners = set(self.counts[namespace, path[:length]])
            active = owners if active is None else active & owners
            lengths.update(dict.fromkeys(active, length))
        return lengths
