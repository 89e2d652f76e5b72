"""Random numbers, distributions and samples: each held to published values, to transformers, or to exact probabilities."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from back_ends import ON_HOST, make_back_end
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from titan.core.random import Purpose, philox, philox_uniform
from titan.core.sampling_params import SamplingParams
from titan.core.sampling_rows import SamplingRows
from titan.core.trees import DraftTrees
from titan.kernels.interfaces import Backend
from titan.kernels.torch.backend import TorchBackend
from titan.kernels.torch.sampling import draw


def rows_of(num_rows: int, *, seed: int = 0, **options: Any) -> SamplingRows:
    """The same options for all rows, positions 0, 1, ..."""
    return SamplingRows.of([(SamplingParams(**options), seed, position) for position in range(num_rows)])


def sample(backend: Backend, logits: Tensor, rows: SamplingRows) -> list[int]:
    """A token of each row, as requests without drafts get them."""
    trees = DraftTrees.empty(len(logits), backend.device)
    verified = backend.trees.verify(logits.to(backend.device), trees, np.arange(len(logits)), rows)
    assert (verified.paths == -1).all() and verified.matches is None
    return verified.final_tokens.tolist()


def sample_many(backend: Backend, logits: Tensor, rows: SamplingRows) -> list[int]:
    """The same; PyTorch, which takes trees one by one, is asked for the tokens of a part of them and samples the rest at once."""
    if backend.name != TorchBackend.name:
        return sample(backend, logits, rows)
    tokens = draw(
        backend.sampling.probs(logits, rows),
        torch.from_numpy(philox_uniform(rows.options["seed"], rows.options["position"], Purpose.SAMPLE)),
    ).tolist()
    few = np.arange(0, len(logits), 100)
    assert sample(backend, logits[few], rows.take(few)) == [tokens[i] for i in few]
    return tokens


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


def options_of(temperature: float, top_k: int, top_p: float, min_p: float) -> dict[str, Any]:
    return {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}


def p_value(tokens: list[int], probs: Tensor) -> float:
    """Of the tokens being sampled from ``probs`` [vocab]; 0 if one came out that cannot."""
    observed = np.bincount(tokens, minlength=len(probs)).astype(float)
    exact = (probs.double() / probs.double().sum()).numpy()
    if observed[exact == 0].sum() > 0:
        return 0.0
    possible = exact > 0
    return float(stats.chisquare(observed[possible], exact[possible] * observed.sum()).pvalue)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("back_end", ON_HOST)
def test_tokens_are_sampled_from_the_exact_distribution(back_end: str, name: str, dtype: torch.dtype) -> None:
    temperature, *cuts = OPTIONS[name]
    num_rows = 40_000
    logits = (torch.randn(12, generator=torch.Generator().manual_seed(1)) * 1.5).to(dtype)
    rows = rows_of(num_rows, seed=11, **options_of(*OPTIONS[name]))
    tokens = sample_many(make_back_end(back_end), logits.expand(num_rows, -1), rows)
    assert p_value(tokens, warped(logits[None], temperature, *cuts)[0]) > 1e-3
    wrong = warped(logits[None], temperature * 1.4, *cuts)[0]
    assert p_value(tokens, wrong) < 1e-5, "a temperature that is 40 % off must be noticed"


@pytest.mark.parametrize("back_end", ON_HOST)
def test_one_seed_per_row_samples_from_the_exact_distribution_too(back_end: str) -> None:
    """As requests of different seeds at the same position do."""
    logits = torch.tensor([1.0, 0.0, 2.0, -1.0])
    num_rows = 20_000
    rows = SamplingRows.of([(SamplingParams(), seed, 3) for seed in range(num_rows)])
    tokens = sample_many(make_back_end(back_end), logits.expand(num_rows, -1), rows)
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
def test_pytorchs_distribution_is_that_of_transformers_row_by_row(
    seed: int, vocab_size: int, options: list[tuple[float, int, float, float]]
) -> None:
    """Rows of different options side by side; what the other back ends are held to."""
    logits = torch.randn(len(options), vocab_size, generator=torch.Generator().manual_seed(seed)) * 2
    rows = SamplingRows.of([(SamplingParams(**options_of(*each)), 0, 0) for each in options])
    probs = make_back_end("torch").sampling.probs(logits, rows).double()
    for i, (temperature, top_k, top_p, min_p) in enumerate(options):
        expected = warped(logits[i : i + 1], temperature, min(top_k, vocab_size), top_p, min_p)[0]
        torch.testing.assert_close(probs[i], expected, rtol=1e-4, atol=1e-6)


def test_temperatures_that_float32_cannot_hold_are_greedy() -> None:
    assert SamplingParams(temperature=1e-50).is_greedy  # not a division by 0 in the middle of a step
    assert not SamplingParams(temperature=1e-40).is_greedy


def test_samples_at_the_ends_of_the_distribution_are_possible_tokens() -> None:
    probs = torch.tensor([[0, 0, 0.25, 0, 0.5, 0.25, 0, 0]])
    tiny = 2.0**-53
    cases = {tiny: 2, 0.25 - tiny: 2, 0.25: 4, 0.75 - tiny: 4, 0.75: 5, 1 - tiny: 5}
    tokens = draw(probs.expand(len(cases), -1) * 4, torch.tensor(list(cases), dtype=torch.float64))
    assert tokens.tolist() == list(cases.values())


def sampled_children(backend: Backend, q: Tensor, counts: list[int]) -> list[list[int]]:
    """Children of rows with the distributions ``q``, written to tables in another order; the rows' q must come out too."""
    num_rows = len(q)
    places = torch.arange(num_rows).flip(0)
    probs, children = torch.full_like(q, torch.nan), torch.full((num_rows, max(counts)), -1)
    rows = SamplingRows.of([(SamplingParams(), seed, 9) for seed in range(num_rows)])
    backend.sampling.sample_children(q.log(), rows, np.array(counts), places, probs, children)
    torch.testing.assert_close(probs[places], q, rtol=1e-6, atol=1e-9, equal_nan=True)
    return children[places].tolist()


@pytest.mark.parametrize("back_end", ON_HOST)
def test_children_are_sampled_without_replacement(back_end: str) -> None:
    """Ordered pairs against their exact probabilities, q(a) q(b) / (1 - q(a))."""
    backend = make_back_end(back_end)
    q = torch.tensor([0.5, 0.2, 0.0, 0.3])
    num_pairs = 20_000
    pairs = np.array(sampled_children(backend, q.repeat(num_pairs, 1), [2] * num_pairs))
    counts = np.zeros((4, 4))
    np.add.at(counts, (pairs[:, 0], pairs[:, 1]), 1)
    expected = q[:, None] * q / (1 - q[:, None]) * (1 - torch.eye(4))
    possible = expected.numpy() > 0
    assert counts[~possible].sum() == 0
    frequencies = expected.double().numpy()[possible]
    assert stats.chisquare(counts[possible], frequencies / frequencies.sum() * num_pairs).pvalue > 1e-3
    with_replacement = (q[:, None] * q).double().numpy()[possible]
    assert stats.chisquare(counts[possible], with_replacement / with_replacement.sum() * num_pairs).pvalue < 1e-6
    exhausted = sampled_children(backend, torch.tensor([[0.0, 1.0], [0.5, 0.5], [torch.nan] * 2]), [3, 1, 2])
    assert [exhausted[0], exhausted[2]] == [[1, -1, -1], [-1, -1, -1]]
    assert exhausted[1][0] in (0, 1) and exhausted[1][1:] == [-1, -1]


def test_streams_of_siblings_differ_from_each_other_and_from_those_of_other_purposes() -> None:
    purposes, siblings = zip(*product(Purpose, range(64)), strict=True)
    numbers = philox_uniform(7, 5, np.array(purposes), sibling=np.array(siblings))
    assert len(set(numbers.tolist())) == len(numbers)
