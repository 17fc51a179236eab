"""The slots of the tokens with the highest scores, against `model.sparse.highest`."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from radixrt.worker.cuda.latent import selection
from radixrt.worker.model.layers.sparse import HIGHEST, highest

LENGTHS = [25, 26, 120, 128, 129, 700, 1000]


def drawn(kind: str, columns: int, device) -> torch.Tensor:
    """Scores of len(LENGTHS) queries."""
    scores = torch.randn(len(LENGTHS), columns, generator=torch.Generator().manual_seed(0))
    if kind == "few values":
        scores = scores.round()
    if kind == "zeros":  # -0 is 0
        scores = torch.where(scores > 1.5, scores, torch.where(scores > 0, 0.0, -0.0))
    if kind == "equal":
        scores = torch.full_like(scores, -3.0)
    if kind == "huge":
        scores = torch.where(scores > 1.9, HIGHEST, scores.exp() * 1e37)
        scores[:, 7], scores[:, 9] = torch.inf, -torch.inf
    if kind == "last":
        scores = torch.arange(columns).float().expand_as(scores) - 300
    return scores.to(device)


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("kind", ["random", "few values", "zeros", "equal", "huge", "last"])
def test_slots_of_the_highest(kind, page_size, device):
    """Beyond a query's own tokens scores are not read, and there are more equal ones than a program holds."""
    count, columns, rng = 24, 1024, np.random.default_rng(0)
    scores = drawn(kind, columns, device)
    table = torch.from_numpy(rng.permutation(len(LENGTHS) * columns).astype(np.int32)).view(len(LENGTHS), -1).to(device)
    rows = rng.permutation(len(LENGTHS))
    queries = np.stack([np.arange(len(LENGTHS)), rows, np.array(LENGTHS) - 1], axis=1).astype(np.int32)
    expected = []
    for (_, row, position), given in zip(queries.tolist(), scores, strict=True):
        given[position + 1 :] = torch.nan
        at = highest(given[None, : position + 1], count)[0]
        expected.append(table[row, at // page_size] * page_size + at % page_size)
    out = torch.full((len(LENGTHS) - 2, count), -1, dtype=torch.int32, device=device)
    selection.select(scores[2:].clone(), torch.from_numpy(queries).to(device), table, out, page_size, first=2)
    assert torch.equal(out, torch.stack(expected[2:]).int())
    out = torch.full((2, count), -1, dtype=torch.int32, device=device)
    selection.select(scores[:2], torch.from_numpy(queries).to(device), table, out, page_size)
    assert torch.equal(out, torch.stack(expected[:2]).int())
