"""Distributions of rows against `titan.sample.distributions` and, where logits are equal, against the slow twin, which sorts."""

from __future__ import annotations

import re
from itertools import product

import numpy as np
import pytest
import torch
from row_options import DEVICE, RowOptions
from torch import Tensor

from titan.kernels.triton.row_distribution import CHUNK, MAX_CANDIDATES, normalized_probs, row_distributions
from titan.sample.distributions import target_probs

ALL_OPTIONS = list(product((0.7, 5.0), (0, 3, 50), (1.0, 0.9, 0.3), (0.0, 0.1)))


def random_logits(num_rows: int, vocab_size: int, *, seed: int = 0) -> Tensor:
    return (torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 2).to(DEVICE)


def kernel_probs(logits: Tensor, options: RowOptions) -> Tensor:
    return normalized_probs(row_distributions(logits, **options.for_distribution())).cpu()


def assert_same_distribution(actual: Tensor, expected: Tensor) -> None:
    assert torch.equal(actual > 0, expected > 0)
    torch.testing.assert_close(actual.double(), expected.double(), rtol=2e-5, atol=1e-9)


@pytest.mark.parametrize(
    ("vocab_size", "options"), [(7, ALL_OPTIONS[::5]), (100, ALL_OPTIONS), (5000, ALL_OPTIONS[1::5]), (CHUNK, ALL_OPTIONS[2::9])]
)
def test_probabilities_are_those_of_the_host_for_all_options(
    vocab_size: int, options: list[tuple[float, int, float, float]]
) -> None:
    rows = RowOptions(options)
    logits = random_logits(len(rows), vocab_size)
    expected = target_probs(logits.cpu(), rows.on_host(), np.arange(len(rows)))
    assert_same_distribution(kernel_probs(logits, rows), expected)


def test_ties_are_cut_by_token_id() -> None:
    """Of five values that many tokens share each, the cuts fall on one of them."""
    top_k, top_p = [(1.0, 4, 1.0, 0.0), (2.0, 23, 1.0, 0.0)], [(1.0, 0, 0.37, 0.0), (3.0, 40, 0.51, 0.0), (3.0, 9, 0.9, 0.3)]
    rows = RowOptions([*top_k, *top_p, (1.0, 0, 1.0, 1.0), (1.0, 3, 1.0, 1.0)])
    logits = torch.randint(-2, 3, (len(rows), 61), generator=torch.Generator().manual_seed(3)).float().to(DEVICE)
    logits[logits == 0] = -0.0
    logits[:, 5:30:7] = 0.0  # the same number
    logits[3, ::2] = -torch.inf
    expected = rows.reference_probs(logits)
    assert_same_distribution(kernel_probs(logits, rows), expected)
    at_the_edge = [row[kept > 0].min() for row, kept in zip(logits.cpu(), expected, strict=True)]
    is_cut = [
        bool(((row == edge) & (kept == 0)).any()) for row, edge, kept in zip(logits.cpu(), at_the_edge, expected, strict=True)
    ]
    assert sum(is_cut) >= 5, "hardly a cut falls between equal logits: nothing is tested"


def test_ties_are_counted_across_chunks() -> None:
    rows = RowOptions([(1.0, 2 * CHUNK + 9, 1.0, 0.0), (1.0, 5, 1.0, 0.0), (0.0, 0, 1.0, 0.0)])
    logits = torch.zeros(len(rows), 2 * CHUNK + 500, device=DEVICE)
    logits[:, [1, 4000, CHUNK + 2]] = 1.0
    kept = [probs.nonzero()[:, 0].tolist() for probs in kernel_probs(logits, rows)]
    assert kept[0] == list(range(2 * CHUNK + 9))
    assert kept[1] == [0, 1, 2, 4000, CHUNK + 2]
    assert kept[2] == [1]


@pytest.mark.parametrize(
    "options", [(1.0, MAX_CANDIDATES + 300, 1.0, 0.0), (3.0, 0, 0.98, 0.0), (2.0, MAX_CANDIDATES + 900, 0.97, 0.0)]
)
def test_more_tokens_than_candidates_are_cut_where_they_must(options: tuple[float, int, float, float]) -> None:
    rows = RowOptions([options])
    logits = random_logits(1, 6000, seed=4) / 2
    expected = target_probs(logits.cpu(), rows.on_host(), np.arange(1))
    assert MAX_CANDIDATES < (expected > 0).sum() < 6000
    actual = kernel_probs(logits, rows)
    # the host adds up thousands of tokens in float32: the last of them may differ
    assert ((actual > 0) != (expected > 0)).sum() <= (3 if options[2] < 1 else 0)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_logits_in_strided_rows_are_read_as_they_are(dtype: torch.dtype) -> None:
    rows = RowOptions(ALL_OPTIONS[1::7])
    wide = torch.full((len(rows), 400), torch.nan, dtype=dtype, device=DEVICE)
    logits = wide[:, 40:340]
    logits.copy_(random_logits(len(rows), 300, seed=5))
    assert_same_distribution(kernel_probs(logits, rows), rows.reference_probs(logits))


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-44])
def test_a_tiny_temperature_or_no_top_p_leaves_the_most_likely_token(temperature: float) -> None:
    logits = random_logits(4, 30) * 50
    options = [(temperature, 0, 1.0, 0.0), (temperature, 5, 0.9, 0.0), (temperature, 0, 1.0, 0.2), (9.0, 0, 0.0, 0.0)]
    probs = kernel_probs(logits, RowOptions(options))
    assert torch.equal(probs, torch.nn.functional.one_hot(logits.argmax(-1), 30).float().cpu())


def test_impossible_tokens_stay_impossible_and_broken_rows_are_marked() -> None:
    options = [(1.0, 0, 1.0, 0.0), (1.0, 4, 1.0, 0.0), (1.0, 0, 0.99, 0.0), (1.0, 0, 1.0, 0.1)]
    rows = RowOptions([*options, *options, (0.0, 0, 1.0, 0.0)])
    logits = random_logits(len(rows), 5)
    logits[:4, [0, 3]] = -torch.inf  # fewer tokens are left than top-k
    logits[4, 2] = torch.nan
    logits[5, 1] = torch.inf
    logits[6] = -torch.inf
    logits[7, 4] = torch.nan
    logits[8, 0] = torch.nan
    probs = kernel_probs(logits, rows)
    assert_same_distribution(probs[:4], RowOptions(options).reference_probs(logits[:4]))
    assert probs[4:].isnan().all()


def test_no_rows_have_no_distributions() -> None:
    empty = {"top_k": torch.zeros(0, dtype=torch.int32, device=DEVICE)}
    empty |= {name: torch.zeros(0, device=DEVICE) for name in ("temperature", "top_p", "min_p")}
    assert normalized_probs(row_distributions(torch.zeros(0, 9, device=DEVICE), **empty)).shape == (0, 9)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("logits", torch.zeros(9), "logits has shape [9]: it must be [any, any]"),
        ("logits", torch.zeros(2, 0), "logits has shape [2, 0]: there must be at least one token"),
        ("logits", torch.zeros(2, 9).double(), "logits has dtype torch.float64: it must be torch.float32 or "),
        ("temperature", torch.zeros(3), "temperature has shape [3]: it must be [2]"),
        ("top_k", torch.zeros(2, dtype=torch.int64), "top_k has dtype torch.int64: it must be torch.int32"),
        ("top_p", torch.zeros(2).double(), "top_p has dtype torch.float64: it must be torch.float32"),
        ("min_p", torch.zeros(2, device="meta"), "min_p is on meta: it must be on "),
    ],
)
def test_what_the_kernels_cannot_take_is_refused_by_name(name: str, value: Tensor, message: str) -> None:
    given = {"logits": random_logits(2, 9), **RowOptions([(1.0, 0, 1.0, 0.0)] * 2).for_distribution()}
    given[name] = value if value.is_meta else value.to(DEVICE)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        row_distributions(**given)
