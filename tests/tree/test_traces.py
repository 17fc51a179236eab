"""Hit rates on a recorded trace, against known ones."""

from __future__ import annotations

import gzip
import json
from array import array
from pathlib import Path

import pytest

from radixrt.tree import RadixTree


@pytest.fixture(scope="module")
def prompts(shared_data: Path) -> list[array]:
    """Block ids of each request's prompt, in order of arrival; a block is 512 tokens and all before it."""
    text = gzip.open(shared_data / "mooncake" / "conversation_trace.jsonl.gz", "rt").read()
    return [array("i", json.loads(line)["hash_ids"]) for line in text.split("\n") if line]


@pytest.mark.parametrize(
    ("budget", "rate"),
    [(1_000, 0.0445), (10_000, 0.2116), (30_000, 0.3257), (50_000, 0.3546), (100_000, 0.3637), (None, 0.3664)],
)
def test_block_hit_rate_under_lru(prompts, budget, rate):
    tree, hits = RadixTree(), 0
    for blocks in prompts:
        hits += tree.match("", blocks).length
        tree.insert("", blocks, blocks)
        if budget is not None and tree.tokens > budget:
            tree.evict(tree.tokens - budget)
    assert round(hits / sum(map(len, prompts)), 4) == rate
