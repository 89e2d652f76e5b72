"""Draws from rows of logits: the same tokens as `titan.sample.distributions`, and frequencies of their own."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from row_options import DEVICE, RowOptions
from scipy import stats
from torch import Tensor

from titan.bench.gpu.acceptance_reference import reference_draw
from titan.kernels.triton.row_distribution import CHUNK, RowDistributions, row_distributions
from titan.kernels.triton.sample_rows import draw_rows, sample_rows
from titan.sample.distributions import Purpose, philox_uniform
from titan.sample.distributions import sample_rows as host_sample_rows

OPTIONS = list(product((0.0, 0.7, 5.0), (0, 3), (1.0, 0.9), (0.0, 0.1)))


def random_logits(num_rows: int, vocab_size: int, *, seed: int = 0) -> Tensor:
    return (torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 2).to(DEVICE)


def sampled(logits: Tensor, rows: RowOptions, purpose: int = Purpose.SAMPLE) -> Tensor:
    return sample_rows(logits, **rows.for_distribution(), **rows.for_draw(), purpose=purpose).cpu()


@pytest.mark.parametrize(
    ("vocab_size", "options"),
    [(1, OPTIONS[::9]), (7, OPTIONS), (5000, OPTIONS[1::2]), (2 * CHUNK, [(5.0, 0, 1.0, 0.0)] * 20)],
)
def test_tokens_are_those_of_the_host_for_all_options(vocab_size: int, options: list[tuple[float, int, float, float]]) -> None:
    rows = RowOptions(options)
    logits = random_logits(len(rows), vocab_size)
    assert torch.equal(sampled(logits, rows), host_sample_rows(logits.cpu(), rows.on_host()))


def test_draws_fall_where_the_cumulative_distribution_says() -> None:
    rows = RowOptions([(1.5, 0, 1.0, 0.0)] * 12 + [(1.0, 5, 1.0, 0.0)] * 12)
    logits = random_logits(1, 23, seed=1).expand(len(rows), -1)
    for purpose in (Purpose.SAMPLE, Purpose.DRAFT):
        uniform = philox_uniform(rows.seeds, rows.positions, purpose).tolist()
        expected = [reference_draw(*each) for each in zip(rows.reference_probs(logits), uniform, strict=True)]
        assert sampled(logits, rows, purpose).tolist() == expected
        assert len(set(expected)) > 4


def test_greedy_rows_take_the_first_of_equal_logits() -> None:
    logits = torch.zeros(3, CHUNK + 10, device=DEVICE)
    logits[0, [70, CHUNK - 1, CHUNK + 1]] = 1.0
    logits[1, [CHUNK + 3, CHUNK + 7]] = 1.0
    logits[2, 5:] = -torch.inf
    logits[2] -= 4.0
    assert sampled(logits, RowOptions([(0.0, 9, 0.5, 0.5)] * 3)).tolist() == [70, CHUNK + 3, 0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_give_no_token(temperature: float) -> None:
    logits = random_logits(5, 9)
    logits[1, 4] = torch.inf
    logits[2] = -torch.inf
    logits[3, 5] = -torch.inf  # one impossible token is fine
    logits[4, 8] = torch.nan
    rows = RowOptions([(temperature, 0, 1.0, 0.0)] * 5)
    tokens = sampled(logits, rows)
    assert [token >= 0 for token in tokens.tolist()] == [True, False, False, True, False]
    assert torch.equal(tokens, host_sample_rows(logits.cpu(), rows.on_host()))


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    rows = RowOptions(OPTIONS[:16:3])
    logits = random_logits(len(rows), 50, seed=2)
    together = sampled(logits, rows).tolist()
    for i, options in enumerate(OPTIONS[:16:3]):
        alone = RowOptions([options])
        alone.seeds, alone.positions = rows.seeds[i : i + 1], rows.positions[i : i + 1]
        assert sampled(logits[i : i + 1], alone).tolist() == together[i : i + 1]


def test_frequencies_are_those_of_the_distribution_and_not_of_another_temperature() -> None:
    num_draws, vocab_size = 160, 6
    row = RowOptions([(1.0, 5, 1.0, 0.0)])
    logits = random_logits(1, vocab_size, seed=6) / 2
    one = row_distributions(logits, **row.for_distribution())
    many = {name: getattr(one, name).expand(num_draws).contiguous() for name in ("peaks", "scales", "thresholds", "last_ties")}
    masses = one.chunk_masses.expand(num_draws, -1).contiguous()
    distributions = RowDistributions(logits=logits.expand(num_draws, -1), chunk_masses=masses, **many)
    seeds = torch.full((num_draws,), 5, dtype=torch.int64, device=DEVICE)
    tokens = draw_rows(distributions, seeds, torch.arange(num_draws, device=DEVICE), purpose=Purpose.DRAFT)
    counts = np.bincount(tokens.cpu().numpy(), minlength=vocab_size)

    def p_value(temperature: float) -> float:
        row.temperature[:] = temperature
        probs = row.reference_probs(logits)[0].numpy()
        assert counts[probs == 0].sum() == 0 and (probs == 0).sum() == 1
        return float(stats.chisquare(counts[probs > 0], probs[probs > 0] * num_draws).pvalue)

    assert p_value(1.0) > 1e-3
    assert p_value(0.5) < 1e-5 and p_value(2.5) < 1e-5


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("seeds", torch.zeros(3, dtype=torch.int64), "seeds has shape [3]: it must be [2]"),
        ("positions", torch.zeros(2, dtype=torch.int32), "positions has dtype torch.int32: it must be torch.int64"),
        ("purpose", 256, "purpose=256 is not allowed: it must be 0 to 255"),
        ("purpose", -1, "purpose=-1 is not allowed: it must be 0 to 255"),
    ],
)
def test_what_the_kernel_cannot_take_is_refused_by_name(name: str, value: Tensor | int, message: str) -> None:
    rows = RowOptions([(1.0, 0, 1.0, 0.0)] * 2)
    distributions = row_distributions(random_logits(2, 9), **rows.for_distribution())
    given = {**rows.for_draw(), "purpose": 0, name: value.to(DEVICE) if isinstance(value, Tensor) else value}
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        draw_rows(distributions, **given)


def test_no_rows_give_no_tokens() -> None:
    rows = RowOptions([(1.0, 0, 1.0, 0.0)])
    distributions = row_distributions(random_logits(1, 9), **rows.for_distribution())
    none = replace(distributions, **{name: getattr(distributions, name)[:0] for name in RowDistributions.__slots__})
    draw = {name: values[:0] for name, values in rows.for_draw().items()}
    assert draw_rows(none, **draw, purpose=0).tolist() == []
