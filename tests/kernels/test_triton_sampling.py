"""What the Triton kernels for sampling do beyond what all back ends must: equal logits, many chunks, and rows that lie apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from acceptance_reference import Option, reference_probs
from interpreted import DEVICE, ON_CUDA
from torch import Tensor

from titan.core.random import Purpose, philox_uniform
from titan.core.trees import NODE_DTYPES, NodeColumns
from titan.kernels.triton.row_distribution import CHUNK, RowDistributions, normalized_probs, row_distributions
from titan.kernels.triton.sample_rows import draw_rows
from titan.kernels.triton.tree_select import select_trees
from titan.kernels.triton.tree_walk import VerifiedTrees, walk_matches


def distributions(logits: Tensor, options: Sequence[Option]) -> RowDistributions:
    names, dtypes = ("temperature", "top_k", "top_p", "min_p"), (torch.float32, torch.int32, torch.float32, torch.float32)
    columns = zip(names, dtypes, zip(*options, strict=True), strict=True)
    return row_distributions(logits, **{name: torch.tensor(each, dtype=dtype, device=DEVICE) for name, dtype, each in columns})


def longs(values: np.ndarray) -> Tensor:  # type: ignore[type-arg]
    return torch.from_numpy(values.view(np.int64)).to(DEVICE)


def random_logits(num_rows: int, vocab_size: int, seed: int = 1) -> Tensor:
    return (torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 2).to(DEVICE)


def assert_same_distribution(actual: Tensor, expected: Tensor) -> None:
    assert torch.equal(actual > 0, expected > 0)
    torch.testing.assert_close(actual.double(), expected, rtol=2e-5, atol=1e-9)


def test_equal_logits_are_cut_by_token_id() -> None:
    """Of five values that many tokens share each, the cuts fall on one of them."""
    top_k, top_p = [(1.0, 4, 1.0, 0.0), (2.0, 23, 1.0, 0.0)], [(1.0, 0, 0.37, 0.0), (3.0, 40, 0.51, 0.0), (3.0, 9, 0.9, 0.3)]
    options = [*top_k, *top_p, (1.0, 0, 1.0, 1.0), (1.0, 3, 1.0, 1.0)]
    logits = torch.randint(-2, 3, (len(options), 61), generator=torch.Generator().manual_seed(3)).float().to(DEVICE)
    logits[logits == 0] = -0.0
    logits[:, 5:30:7] = 0.0  # the same number
    logits[3, ::2] = -torch.inf
    expected = reference_probs(logits, options)
    assert_same_distribution(normalized_probs(distributions(logits, options)).cpu(), expected)
    rows = [(row, kept, row[kept > 0].min()) for row, kept in zip(logits.cpu(), expected, strict=True)]
    is_cut = [bool(((row == edge) & (kept == 0)).any()) for row, kept, edge in rows]
    assert sum(is_cut) >= 5, "hardly a cut falls between equal logits: nothing is tested"


def test_equal_logits_are_counted_across_chunks() -> None:
    logits = torch.zeros(3, 2 * CHUNK + 500, device=DEVICE)
    logits[:, [1, 4000, CHUNK + 2]] = 1.0
    options = [(1.0, 2 * CHUNK + 9, 1.0, 0.0), (1.0, 5, 1.0, 0.0), (0.0, 0, 1.0, 0.0)]
    kept = [probs.nonzero()[:, 0].tolist() for probs in normalized_probs(distributions(logits, options))]
    assert kept == [list(range(2 * CHUNK + 9)), [0, 1, 2, 4000, CHUNK + 2], [1]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_logits_in_strided_rows_are_read_as_they_are(dtype: torch.dtype) -> None:
    options = [(0.7, 3, 0.9, 0.0), (5.0, 0, 0.3, 0.1), (0.7, 50, 1.0, 0.1), (5.0, 0, 1.0, 0.0)]
    wide = torch.full((len(options), 400), torch.nan, dtype=dtype, device=DEVICE)
    logits = wide[:, 40:340].copy_(random_logits(len(options), 300))
    assert_same_distribution(normalized_probs(distributions(logits, options)).cpu(), reference_probs(logits, options))


@pytest.mark.parametrize(("num_rows", "vocab_size"), [(7, 300), pytest.param(56, 128_256, marks=ON_CUDA)])
def test_distributions_and_draws_over_a_real_vocabulary(num_rows: int, vocab_size: int) -> None:
    """Half the sum of the differences is the most that rounding moves a draw by; many logits are equal."""
    cuts = [(0.75, 50, 1.0, 0.0), (1.0, 0, 0.875, 0.0), (0.75, 1000, 0.9375, 0.0), (1.25, 0, 1.0, 0.03125), (0.5, 20, 0.75, 0.125)]
    options = ([(0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), *cuts] * num_rows)[:num_rows]
    logits = (random_logits(num_rows, vocab_size) * 1.5).bfloat16()
    found, exact, bound = distributions(logits, options), reference_probs(logits, options), 2e-5
    assert (normalized_probs(found).cpu() - exact).abs().sum(-1).max() / 2 <= bound
    seeds, positions = np.arange(num_rows, dtype=np.uint64) * np.uint64(2**40 + 7), np.arange(num_rows) + 5
    tokens = draw_rows(found, longs(seeds), longs(positions), purpose=Purpose.SAMPLE).cpu()[:, None]
    uniform = torch.from_numpy(philox_uniform(seeds, positions, Purpose.SAMPLE))
    mass, end = (each.gather(1, tokens)[:, 0] for each in (exact, exact.cumsum(-1)))
    assert (mass > 0).all() and (end - mass - bound <= uniform).all() and (uniform <= end + bound).all()


def test_nothing_is_no_work() -> None:
    some = distributions(random_logits(1, 9), [(1.0, 0, 1.0, 0.0)])
    none = replace(some, **{name: getattr(some, name)[:0] for name in RowDistributions.__slots__})
    no_longs, start_loc = torch.zeros(0, dtype=torch.int64, device=DEVICE), torch.zeros(1, dtype=torch.int32, device=DEVICE)
    assert draw_rows(none, no_longs, no_longs, purpose=0).tolist() == []
    result = VerifiedTrees.of(no_longs, no_longs.int(), start_loc, max_depth=4)
    walk_matches(result, no_longs)
    assert result.paths.shape == (0, 4) and len(result.final_tokens) == 0
    columns = NodeColumns(*(torch.full((2,), 7, device=DEVICE).to(dtype) for dtype in NODE_DTYPES))
    empty = no_longs.view(0, 1)
    select_trees(empty, empty.float(), empty, empty, no_longs.int(), no_longs.int(), columns)
    assert all((column == 7).all() for column in columns)
