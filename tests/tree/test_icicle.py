"""Outlines of an index' tree, and what a path has parted from."""

from __future__ import annotations

from array import array

import pytest

from radixrt.tree import OwnerTree, RadixTree


def ints(*values: int) -> array:
    return array("i", values)


def outlined(tree: OwnerTree, most: int, seen: RadixTree | None = None, prefix: str = "", node=(None, 0)) -> list:
    """(depth, tokens, of the subtree, last use, left out, on a device) of each row."""
    _, rows = tree.icicle(prefix, most, seen or RadixTree(values=False), *node)
    return [row[3:9] for row in rows]


def test_the_largest_subtrees_are_kept_with_all_above_them():
    tree = OwnerTree()
    tree.store(0, "", 1, 0, 0, 0, ints(*range(100)))
    tree.store(0, "", 2, 0, 1, 50, ints(*range(1000, 1040)))
    tree.store(0, "", 3, 0, 1, 60, ints(7))
    rows = outlined(tree, 4)
    assert [row[:3] for row in rows if row[0] == 0] == [(0, 50, 141)]
    assert sorted(row[2] for row in rows) == [40, 40, 51, 141], "each row has all tokens below it"
    assert sum(row[4] for row in rows) == 1, "the token 7"
    assert [row[:3] for row in outlined(tree, 1)] == [(0, 50, 141)]


def test_below_a_node_its_subtree_is_all():
    tree, seen = OwnerTree(), RadixTree(values=False)
    for run, first in ((1, 5), (2, 6)):
        tree.store(0, "", run, 0, 0, 0, ints(1, 2, first, 3))
    seen.insert("", ints(1, 2, 5, 3))
    seen.insert("", ints(1, 2, 6, 3))
    _, rows = tree.icicle("", 10, seen, None, 0)
    (node,) = [row[:2] for row in rows if row[3] == 2 and row[6] == seen.clock]
    total, below = tree.icicle("", 10, seen, *node)
    assert total == 2 and [row[3:7] for row in below] == [(2, 2, 2, seen.clock)]
    assert tree.icicle("", 10, seen, 99, 1) is None and tree.edge("x", 10, *node) is None


def test_a_prefix_hides_other_namespaces():
    tree = OwnerTree()
    tree.store(0, "a\n", 1, 0, 0, 0, ints(1, 2))
    tree.store(0, "ab\n", 2, 0, 0, 0, ints(3))
    assert outlined(tree, 10, prefix="a\n") == [(0, 2, 2, 0, 0, True)]
    (node,) = [row[:2] for row in tree.icicle("ab\n", 10, RadixTree(values=False), None, 0)[1]]
    assert tree.icicle("a\n", 10, RadixTree(values=False), *node) is None
    assert tree.namespaces() == {"a\n": 2, "ab\n": 1}


def test_what_only_runs_of_the_host_have_is_not_on_a_device():
    tree = OwnerTree()
    tree.store(0, "", 1, 0, 0, 0, ints(1, 2))
    tree.store(0, "", -1, 0, 0, 0, ints(1, 2, 3))
    assert [(row[0], row[5]) for row in outlined(tree, 10)] == [(0, True), (2, False)]


def test_a_use_counts_for_all_above_it():
    tree, seen = OwnerTree(), RadixTree(values=False)
    for run, path in enumerate((ints(1, 2, 3), ints(1, 2, 4), ints(9)), 1):
        tree.store(0, "", run, 0, 0, 0, path)
        seen.insert("", path)
    seen.insert("", ints(1, 2, 3, 5, 6))  # longer than what is cached
    assert {(row[0], row[3]) for row in outlined(tree, 10, seen)} == {(0, 4), (2, 4), (2, 2), (0, 3)}


@pytest.mark.parametrize(
    ("before", "own", "at", "expected"),
    [
        ([(1, 2, 3, 4)], (1, 2, 5), 2, (3, 4)),
        ([(1, 2, 3, 4), (1, 2, 6, 7)], (1, 2, 5), 2, (6, 7)),  # the latest one
        ([(1, 2, 3), (1, 2, 3, 4, 8), (1, 2, 3, 9)], (1, 2, 5), 2, (3, 9)),
        ([(1, 2, 3, 4)], (1, 2), 2, ()),  # it does not go on
        ([(1, 2)], (1, 2, 3), 2, ()),  # it extends what there was
        ([], (1, 2), 0, ()),
        ([(8, 9)], (1, 2), 0, (8, 9)),
    ],
)
def test_what_followed_where_a_path_parted(before, own, at, expected):
    tree = RadixTree(values=False)
    for path in before:
        tree.insert("", ints(*path))
    assert tree.insert("", ints(*own)) == at
    tree.insert("", ints(*own[:at], 77, 78))  # whatever comes later is not what it parted from
    assert tree.continuation("", ints(*own), at, 10) == ints(*expected).tobytes()
    assert tree.continuation("", ints(*own), at, 1) == ints(*expected[:1]).tobytes()
