"""The radix tree compared with one in plain Python, and with the cost of comparing memory, on five workloads.

W1  10,000 requests: 4,096 shared tokens and 64 to 512 of their own
W2  64 sessions of 40 turns of 200 to 1,500 tokens on 3 system prompts of 6,000; each turn matches its whole history
W3  tree of thought: depth 6, fan-out 5, nodes of 200 tokens under 2,000, breadth first
W4  200,000 prompts of 32 tokens, 16 of them shared
W5  one sequence of a million tokens, matched at 100 depths

    python -m bench.tree [--quick]

The floor is one `bytes ==` over the cached part of each query, on new copies. Results of both trees are compared before
anything is timed.
"""

from __future__ import annotations

import argparse
import gc
import resource
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from bench.common import median_us, save, table
from radixrt.tree import RadixTree

VOCAB = 128_000


# ---------------------------------------------------------------- workloads


def make_workloads(scale: float) -> dict[str, list[np.ndarray]]:
    """Token ids (int32) of queries, in order, by workload."""
    rng = np.random.default_rng(0)

    def ids(count: int) -> np.ndarray:
        return rng.integers(0, VOCAB, count, dtype=np.int32)

    def join(*parts: np.ndarray) -> np.ndarray:
        return np.concatenate(parts)

    shared = ids(4096)
    w1 = [join(shared, ids(rng.integers(64, 513))) for _ in range(int(10_000 * scale))]

    systems = [ids(6000) for _ in range(3)]
    histories = [systems[i % 3] for i in range(64)]
    w2 = []
    for _ in range(max(2, int(40 * scale))):
        for i in range(64):
            histories[i] = join(histories[i], ids(rng.integers(200, 1501)))
            w2.append(histories[i])

    level, w3 = [ids(2000)], []
    for _ in range(6 if scale == 1 else 4):
        level = [join(node, ids(200)) for node in level for _ in range(5)]
        w3 += level

    trunk = ids(16)
    w4 = [join(trunk, ids(16)) for _ in range(int(200_000 * scale))]
    whole = ids(int(1_000_000 * scale))
    w5 = [whole] + [whole[: len(whole) * k // 100] for k in range(1, 101)]
    return {"W1": w1, "W2": w2, "W3": w3, "W4": w4, "W5": w5}


# ---------------------------------------------------------------- a plain Python tree


@dataclass(slots=True)
class Node:
    ids: np.ndarray
    values: np.ndarray
    children: dict[int, Node] = field(default_factory=dict)


class PythonTree:
    """A compressed radix tree of dicts and numpy arrays that can only match and insert."""

    def __init__(self) -> None:
        self.root = Node(np.zeros(0, np.int32), np.zeros(0, np.int32))

    def match(self, ids: np.ndarray) -> int:
        node, at = self.root, 0
        while at < len(ids) and (child := node.children.get(int(ids[at]))):
            same = shared_prefix(child.ids, ids[at:])
            at += same
            if same < len(child.ids):
                break
            node = child
        return at

    def insert(self, ids: np.ndarray, values: np.ndarray) -> int:
        node, at = self.root, 0
        while at < len(ids) and (child := node.children.get(int(ids[at]))):
            same = shared_prefix(child.ids, ids[at:])
            if same < len(child.ids):
                upper = Node(child.ids[:same], child.values[:same], {int(child.ids[same]): child})
                node.children[int(ids[at])] = upper
                child.ids, child.values = child.ids[same:], child.values[same:]
                child = upper
            at += same
            node = child
        if at < len(ids):
            node.children[int(ids[at])] = Node(ids[at:], values[at:])
        return at


def shared_prefix(a: np.ndarray, b: np.ndarray) -> int:
    size = min(len(a), len(b))
    differs = np.flatnonzero(a[:size] != b[:size])
    return int(differs[0]) if differs.size else size


# ---------------------------------------------------------------- the runs


def check_answers(queries: list[np.ndarray]) -> list[int]:
    """Assert that both trees give the same hits for all queries. Returns the hits, in tokens."""
    fast, plain, hits = RadixTree(), PythonTree(), []
    for ids in queries:
        hit = fast.match("", ids).length
        assert hit == plain.match(ids)
        values = np.arange(len(ids), dtype=np.int32)
        assert fast.insert("", ids, values) == plain.insert(ids, values) == hit
        hits.append(hit)
    return hits


def run_workload(name: str, queries: list[np.ndarray]) -> dict[str, object]:
    hits = check_answers(queries)
    values = np.arange(max(map(len, queries)), dtype=np.int32)
    row: dict[str, object] = {"workload": name, "queries": len(queries)}

    pairs = [(q[:h].tobytes(), q[:h].tobytes()) for q, h in zip(queries, hits, strict=True)]
    row["floor_us"] = median_us(lambda pair: pair[0] == pair[1], pairs)[0]
    del pairs

    row["python_match_us"], row["python_insert_us"] = run_python(queries, values)
    gc.collect()

    tree = RadixTree()
    times = list(interleave(queries, lambda q: tree.match("", q), lambda q: tree.insert("", q, values[: len(q)])))
    row["match_us"], row["insert_us"] = (float(np.median(x)) for x in zip(*times, strict=True))
    row["match_again_us"] = median_us(lambda q: tree.match("", q), queries)[0]
    row["lease_release_us"] = lease_and_release(tree, queries[-1000:])
    row["values_us"] = median_us(lambda match: match.values(), [tree.match("", q) for q in queries[-2000:]])[0]
    row["bytes_per_token"] = tree.memory_bytes / tree.tokens
    row["evict_1024_us"] = median_us(lambda _: tree.evict(1024), range(min(200, tree.tokens // 4096)))[0]
    row["times_python"] = row["python_match_us"] / row["match_us"]
    return row


def interleave(
    queries: list[np.ndarray], match: Callable[[np.ndarray], object], insert: Callable[[np.ndarray], object]
) -> Iterator[tuple[float, float]]:
    """Match and insert each query. Yields (match, insert) in microseconds."""
    for query in queries:
        yield median_us(match, [query])[0], median_us(insert, [query])[0]


def run_python(queries: list[np.ndarray], values: np.ndarray) -> tuple[float, float]:
    tree = PythonTree()
    times = list(interleave(queries, tree.match, lambda q: tree.insert(q, values)))
    match, insert = (float(np.median(x)) for x in zip(*times, strict=True))
    return match, insert


def lease_and_release(tree: RadixTree, queries: list[np.ndarray]) -> float:
    """Median microseconds of a lease and its release, for paths that are wholly in the tree (so no node is split)."""
    return float(np.median([median_us(lambda m: tree.lease(m).release(), [tree.match("", q)])[0] for q in queries]))


def grows_faster_than_the_work(scale: float) -> list[dict[str, object]]:
    """Operations on trees of growing size, whose cost should not grow."""
    rng = np.random.default_rng(1)
    rows = []
    for leaves in (5_000, 20_000, 80_000, 200_000):
        tree = RadixTree()
        for ids in rng.integers(0, VOCAB, (int(leaves * scale), 32), dtype=np.int32):
            tree.insert("", ids, ids)
        rows.append(
            {"probe": f"evict(1024), {leaves} leaves", "us": median_us(lambda _, t=tree: t.evict(1024), range(40))[0]}
        )
    for nodes in (16, 128, 1024):
        tree, ids = RadixTree(), rng.integers(0, VOCAB, 65_536, dtype=np.int32)
        step = len(ids) // nodes
        for end in range(step, len(ids) + 1, step):
            tree.insert("", ids[:end], ids[:end])
            branch = np.concatenate([ids[: end - 1], [VOCAB]]).astype(np.int32)  # keeps the nodes apart
            tree.insert("", branch, branch)
        rows.append(
            {
                "probe": f"match 65,536 tokens in {nodes} nodes",
                "us": median_us(lambda _, t=tree, q=ids: t.match("", q), range(50))[0],
            }
        )
        rows.append({"probe": "lease + release of that chain", "us": lease_and_release(tree, [ids] * 50)})
    for size in (10_000, 100_000, 1_000_000):
        splits = []
        for _ in range(5):
            tree, ids = RadixTree(), rng.integers(0, VOCAB, size, dtype=np.int32)
            tree.insert("", ids, ids)
            match = tree.match("", ids[: size // 2])
            splits.append(median_us(lambda m, t=tree: t.lease(m), [match])[0])
        rows.append({"probe": f"split of a node of {size} tokens", "us": float(np.median(splits))})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the work, to see that it runs")
    args = parser.parse_args()
    scale = 0.1 if args.quick else 1.0
    rows = []
    for name, queries in make_workloads(scale).items():
        rows.append(run_workload(name, queries))
        gc.collect()
    probes = grows_faster_than_the_work(scale)
    print(table(rows), table(probes), sep="\n\n")
    if not args.quick:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        save("tree", rows, probes=probes, peak_mb=peak)


if __name__ == "__main__":
    main()
