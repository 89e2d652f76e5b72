"""Random numbers, distributions and draws: each held to published values, to transformers, or to exact probabilities."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from titan.kernels.torch.sampling import draw
from titan.sample.distributions import Purpose, SamplingRows, philox, philox_uniform, sample_rows, target_probs


def rows_of(
    num_rows: int,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
    forbidden: list[tuple[int, list[int]]] | None = None,
) -> SamplingRows:
    """The same options for all rows, positions 0, 1, ..."""
    return SamplingRows(
        np.full(num_rows, temperature, np.float32),
        np.full(num_rows, top_k, np.int64),
        np.full(num_rows, top_p, np.float32),
        np.full(num_rows, min_p, np.float32),
        np.full(num_rows, seed, np.uint64),
        np.arange(num_rows),
        forbidden or [],
    )


def warped(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """The distribution as transformers makes it, in float64."""
    scores = logits.double()
    prefix = torch.zeros(len(scores), 1, dtype=torch.int64)
    scores = TemperatureLogitsWarper(temperature)(prefix, scores)
    if top_k > 0:
        scores = TopKLogitsWarper(top_k)(prefix, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(prefix, scores)
    if min_p > 0:
        scores = MinPLogitsWarper(min_p)(prefix, scores)
    return scores.softmax(-1)


# https://github.com/DEShawResearch/random123/blob/main/tests/kat_vectors
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


def test_philox_gives_the_published_answers() -> None:
    counters = np.array([words(counter) for counter, _, _ in KNOWN_ANSWERS], np.uint64).T
    keys = np.array([words(key) for _, key, _ in KNOWN_ANSWERS], np.uint64).T
    assert philox(counters, keys).T.tolist() == [words(answer) for _, _, answer in KNOWN_ANSWERS]


def test_uniform_numbers_are_the_words_of_seed_position_and_purpose() -> None:
    seed, position = 0x299F31D0A4093822, 12345
    word0, word1 = philox(np.array([[position], [1], [0], [0]], np.uint64), np.array([[0xA4093822], [0x299F31D0]], np.uint64))[
        :2, 0
    ]
    expected = ((int(word0) << 20 | int(word1) >> 12) + 0.5) / 2**52
    assert philox_uniform(np.array([seed], np.uint64), np.array([position]), Purpose.CORRUPT) == [expected]


@pytest.mark.parametrize("purpose", Purpose)
def test_uniform_numbers_are_uniform_over_seeds_and_over_positions(purpose: Purpose) -> None:
    many = np.arange(20_000)
    for numbers in (
        philox_uniform(np.full(20_000, 7, np.uint64), many, purpose),
        philox_uniform(many.astype(np.uint64), np.full(20_000, 7), purpose),
    ):
        assert numbers.min() > 0 and numbers.max() < 1
        assert stats.kstest(numbers, "uniform").pvalue > 1e-3
        assert abs(np.corrcoef(numbers[1:], numbers[:-1])[0, 1]) < 0.03


def test_streams_of_seeds_positions_and_purposes_differ() -> None:
    seeds, positions, purposes = zip(*product([0, 1, 2**32, 2**63], range(50), Purpose), strict=True)
    numbers = [
        philox_uniform(np.array([seed], np.uint64), np.array([position]), purpose)[0]
        for seed, position, purpose in zip(seeds, positions, purposes, strict=True)
    ]
    assert len(set(numbers)) == len(numbers)


OPTIONS = {
    "plain": (1.0, 0, 1.0, 0.0),
    "cold": (0.4, 0, 1.0, 0.0),
    "hot": (3.0, 0, 1.0, 0.0),
    "top_k": (1.3, 4, 1.0, 0.0),
    "top_p": (1.0, 0, 0.7, 0.0),
    "min_p": (1.5, 0, 1.0, 0.15),
    "all": (2.0, 9, 0.9, 0.1),
}


def p_value(tokens: Tensor, probs: Tensor) -> float:
    """Of the tokens being drawn from ``probs`` [vocab]; 0 if one came out that cannot."""
    observed = torch.bincount(tokens, minlength=len(probs)).double().numpy()
    exact = (probs.double() / probs.double().sum()).numpy()
    if observed[exact == 0].sum() > 0:
        return 0.0
    possible = exact > 0
    return float(stats.chisquare(observed[possible], exact[possible] * observed.sum()).pvalue)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", OPTIONS)
def test_tokens_are_drawn_from_the_exact_distribution(options: str, dtype: torch.dtype) -> None:
    temperature, top_k, top_p, min_p = OPTIONS[options]
    num_rows = 40_000
    logits = (torch.randn(12, generator=torch.Generator().manual_seed(1)) * 1.5).to(dtype)
    rows = rows_of(num_rows, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=11)
    tokens = sample_rows(logits.expand(num_rows, -1), rows)
    assert p_value(tokens, warped(logits[None], temperature, top_k, top_p, min_p)[0]) > 1e-3
    wrong = warped(logits[None], temperature * 1.4, top_k, top_p, min_p)[0]
    assert p_value(tokens, wrong) < 1e-5, "a temperature that is 40 % off must be noticed"


def test_one_seed_per_row_draws_from_the_exact_distribution_too() -> None:
    """As requests of different seeds at the same position do."""
    logits = torch.tensor([1.0, 0.0, 2.0, -1.0])
    rows = rows_of(20_000)
    rows = SamplingRows(
        rows.temperature, rows.top_k, rows.top_p, rows.min_p, np.arange(20_000, dtype=np.uint64), np.full(20_000, 3), []
    )
    tokens = sample_rows(logits.expand(20_000, -1), rows)
    assert p_value(tokens, logits.softmax(-1)) > 1e-3
    assert p_value(tokens, (logits * 1.1).softmax(-1)) < 1e-5


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32 - 1),
    vocab_size=st.sampled_from((2, 7, 100, 1500)),
    options=st.lists(
        st.tuples(
            st.sampled_from((0.1, 0.7, 1.0, 5.0)),
            st.sampled_from((0, -1, 1, 3, 50, 10**6)),
            st.sampled_from((1.0, 0.999, 0.9, 0.3, 1e-6)),
            st.sampled_from((0.0, 0.01, 0.3, 1.0)),
        ),
        min_size=1,
        max_size=6,
    ),
)
@example(seed=0, vocab_size=1500, options=[(5.0, 0, 0.999, 0.0), (0.1, 0, 0.9, 0.0)])  # more than top-p's first candidates
def test_the_distribution_is_that_of_transformers_row_by_row(
    seed: int, vocab_size: int, options: list[tuple[float, int, float, float]]
) -> None:
    """Rows of different options side by side."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(options), vocab_size, generator=generator) * 2
    columns = list(zip(*options, strict=True))
    rows = SamplingRows(
        np.array(columns[0], np.float32),
        np.array(columns[1], np.int64),
        np.array(columns[2], np.float32),
        np.array(columns[3], np.float32),
        np.zeros(len(options), np.uint64),
        np.arange(len(options)),
        [],
    )
    probs = target_probs(logits, rows, np.arange(len(options))).double()
    probs /= probs.sum(-1, keepdim=True)
    for i, (temperature, top_k, top_p, min_p) in enumerate(options):
        expected = warped(logits[i : i + 1], temperature, min(top_k, vocab_size), top_p, min_p)[0]
        torch.testing.assert_close(probs[i], expected, rtol=1e-4, atol=1e-6)


def test_a_row_depends_on_its_own_options_alone() -> None:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(8, 50, generator=generator)
    rows = SamplingRows(
        np.array([0, 1, 0.5, 2, 1, 0, 1, 3], np.float32),
        np.array([0, 3, 0, -1, 7, 2, 0, 0]),
        np.array([1, 1, 0.5, 1, 0.9, 0.1, 1, 1], np.float32),
        np.array([0, 0, 0, 0.2, 0, 0, 0, 0.1], np.float32),
        np.arange(8, dtype=np.uint64),
        np.arange(8) * 3,
        [(2, [1, 2])],
    )
    together = sample_rows(logits.clone(), rows)
    for i in range(8):
        alone = SamplingRows(
            *(column[i : i + 1] for column in (rows.temperature, rows.top_k, rows.top_p, rows.min_p, rows.seeds, rows.positions)),
            [(0, [1, 2])] if i == 2 else [],
        )
        assert sample_rows(logits[i : i + 1].clone(), alone) == together[i]
    assert together[0] == logits[0].argmax()


def test_probabilities_add_up_and_are_a_rows_own_whatever_its_neighbours_cut() -> None:
    logits = torch.randn(4, 900, generator=torch.Generator().manual_seed(2)) * 2
    options = [(1.0, 0, 1.0, 0.0), (0.7, 0, 1.0, 0.0), (1.0, 5, 1.0, 0.0), (1.3, 0, 0.8, 0.1)]
    temperature, top_k, top_p, min_p = (np.array(column) for column in zip(*options, strict=True))
    rows = SamplingRows(
        temperature.astype(np.float32), top_k, top_p.astype(np.float32), min_p.astype(np.float32), np.zeros(4, np.uint64), top_k, ()
    )
    probs = target_probs(logits, rows, np.arange(4))
    torch.testing.assert_close(probs.double().sum(-1), torch.ones(4, dtype=torch.float64), rtol=0, atol=1e-5)
    for i in range(4):
        columns = (rows.temperature, rows.top_k, rows.top_p, rows.min_p, rows.seeds, rows.positions)
        alone = SamplingRows(*(column[i : i + 1] for column in columns), ())
        assert torch.equal(target_probs(logits[i : i + 1], alone, np.arange(1))[0], probs[i])


def test_forbidden_tokens_never_come_out() -> None:
    logits = torch.zeros(2000, 5)
    logits[:, 3] = 10
    forbidden = [(row, [3, 0]) for row in range(2000)]
    assert set(sample_rows(logits.clone(), rows_of(2000, forbidden=forbidden)).tolist()) == {1, 2, 4}
    assert set(sample_rows(logits.clone(), rows_of(2000, temperature=0.0, forbidden=forbidden)).tolist()) == {1}


@pytest.mark.parametrize("temperature", [1e-3, 1e-6, 1e-30, 1e-44])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    logits = torch.randn(500, 30, generator=torch.Generator().manual_seed(0)) * 20
    assert torch.equal(sample_rows(logits, rows_of(500, temperature=temperature)), logits.argmax(-1))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_logits_that_are_not_finite_give_no_token(bad: float, temperature: float) -> None:
    logits = torch.randn(4, 9, generator=torch.Generator().manual_seed(0))
    logits[1, 4] = bad
    logits[2] = -torch.inf
    logits[3, 5] = -torch.inf  # one impossible token is fine
    tokens = sample_rows(logits, rows_of(4, temperature=temperature)).tolist()
    assert tokens[1:3] == [-1, -1]
    assert tokens[0] >= 0 and tokens[3] >= 0


def test_draws_at_the_ends_of_the_distribution_are_possible_tokens() -> None:
    probs = torch.tensor([[0, 0, 0.25, 0, 0.5, 0.25, 0, 0]])
    tiny = 2.0**-53
    cases = {tiny: 2, 0.25 - tiny: 2, 0.25: 4, 0.75 - tiny: 4, 0.75: 5, 1 - tiny: 5}
    drawn = draw(probs.expand(len(cases), -1) * 4, torch.tensor(list(cases), dtype=torch.float64))
    assert drawn.tolist() == list(cases.values())
