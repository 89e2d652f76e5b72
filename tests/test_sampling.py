"""Random numbers, distributions and samples: each held to published values, to transformers, or to exact probabilities."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from back_ends import make_back_end
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from slow_logits import slow_probs
from torch import Tensor

from titan.core.random import Purpose, philox, philox_uniform
from titan.core.sampling_params import SamplingParams
from titan.core.sampling_rows import SamplingRows
from titan.core.trees import DraftTrees
from titan.kernels.torch.sampling import draw

# https://github.com/DEShawResearch/random123/blob/main/tests/kat_vectors
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> NDArray[np.uint64]:
    return np.array([int(word, 16) for word in text.split()], np.uint64)


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(counter: str, key: str, answer: str) -> None:
    assert philox(words(counter), words(key)).tolist() == words(answer).tolist()


def test_uniform_numbers_are_the_words_of_seed_position_purpose_and_sibling() -> None:
    first, second, *_ = philox(np.array([12345, Purpose.CORRUPT + (62 << 8), 0, 0], np.uint64), words("a4093822 299f31d0")).tolist()
    uniform = philox_uniform(0x299F31D0A4093822, 12345, Purpose.CORRUPT, sibling=62)
    assert uniform == ((first << 20 | second >> 12) + 0.5) / 2**52


def test_streams_of_seeds_positions_purposes_and_siblings_differ() -> None:
    seeds, positions, purposes, siblings = zip(*product((0, 1, 2**32, 2**63), range(9), Purpose, range(63)), strict=True)
    numbers = philox_uniform(np.array(seeds, np.uint64), np.array(positions), np.array(purposes), sibling=np.array(siblings))
    assert len(set(numbers.tolist())) == len(numbers)


@settings(max_examples=60)
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
    params = [SamplingParams(temperature=t, top_k=k, top_p=p, min_p=m) for t, k, p, m in options]
    probs = make_back_end("torch").sampling.probs(logits, SamplingRows.of([(each, 0, 0) for each in params]))
    for i, each in enumerate(params):
        torch.testing.assert_close(probs[i].double(), slow_probs(logits[i].double(), each), rtol=1e-4, atol=1e-6)


def test_the_cuts_of_a_row_cost_the_others_nothing_on_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rows that are cut, those that are not, and greedy ones, whose options cut nothing; only a wide nucleus is sorted whole."""
    looked_at, topk, verify = list[tuple[int, int]](), Tensor.topk, make_back_end("torch").trees.verify

    def counted(values: Tensor, count: int, **options: Any) -> Any:
        looked_at.append((len(values), count))
        return topk(values, count, **options)

    monkeypatch.setattr(Tensor, "topk", counted)
    greedy, plain = SamplingParams(temperature=0.0, top_k=7, top_p=0.9, min_p=0.1), SamplingParams(temperature=1.0)
    narrow, wide = (SamplingParams(temperature=t, top_p=0.9) for t in (0.1, 5.0))
    few, all_cuts = SamplingParams(temperature=1.0, top_k=40), SamplingParams(temperature=1.0, top_k=3, top_p=0.7, min_p=0.2)
    params = [greedy, plain, narrow, greedy, few, wide, plain, all_cuts, plain]
    logits = torch.randn(len(params), 1500, generator=torch.Generator().manual_seed(0)) * 2

    def final_tokens(index: list[int]) -> list[int]:
        rows = SamplingRows.of((params[i], i, 9) for i in index)
        trees = DraftTrees.empty(len(index), torch.device("cpu"))
        return verify(logits[index], trees, np.arange(len(index)), rows).final_tokens.tolist()

    together = final_tokens([*range(len(params))])
    assert looked_at == [(4, 41), (4, 512), (1, 1500)]  # one more than top-k keeps shows whether it ties
    assert together == [token for i in range(len(params)) for token in final_tokens([i])]
    looked_at.clear()
    final_tokens([0, 1, 3, 6, 8])
    assert looked_at == []


def test_temperatures_that_float32_cannot_hold_are_greedy() -> None:
    assert SamplingParams(temperature=1e-50).is_greedy  # not a division by 0 in the middle of a step
    assert not SamplingParams(temperature=1e-40).is_greedy


def test_samples_at_the_ends_of_the_distribution_are_possible_tokens() -> None:
    probs = torch.tensor([[0, 0, 0.25, 0, 0.5, 0.25, 0, 0]])
    tiny = 2.0**-53
    cases = {tiny: 2, 0.25 - tiny: 2, 0.25: 4, 0.75 - tiny: 4, 0.75: 5, 1 - tiny: 5}
    tokens = draw(probs.expand(len(cases), -1) * 4, torch.tensor(list(cases), dtype=torch.float64))
    assert tokens.tolist() == list(cases.values())
