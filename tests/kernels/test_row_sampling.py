"""The parts of sampling: the compiled functions and PyTorch's, against each other and their definitions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cpu_kernels import choose_cpu_kernels

from titan.kernels.cpu.library import load_library
from titan.kernels.torch.sampling import LazyProbs, argmax_rows, best_children, draw, draw_compiled, softmax_at
from titan.sample.distributions import Purpose, philox_uniform


@pytest.fixture(params=["torch", "compiled"], autouse=True)
def _implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "torch":
        choose_cpu_kernels(monkeypatch, "torch")
    elif load_library().library is None:
        pytest.skip(load_library().description)


def random_logits(num_rows: int, vocab_size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(0)) * 8).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("num_rows", "vocab_size"), [(1, 5), (3, 700), (40, 1031)])
def test_softmax_is_its_definition_and_leaves_the_logits(dtype: torch.dtype, num_rows: int, vocab_size: int) -> None:
    logits = random_logits(num_rows, vocab_size, dtype)
    before = logits.clone()
    temperatures = torch.linspace(0.1, 3, num_rows)
    probs = softmax_at(logits, temperatures)
    expected = (logits.double() / temperatures.double()[:, None]).softmax(-1)
    assert probs.dtype == torch.float32
    torch.testing.assert_close(probs.double(), expected, rtol=1e-4, atol=1e-30)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("num_rows", "vocab_size"), [(1, 1), (2, 5), (60, 1031), (9, 20000)])
def test_argmax_is_the_first_of_the_largest(dtype: torch.dtype, num_rows: int, vocab_size: int) -> None:
    logits = random_logits(num_rows, vocab_size, dtype)
    logits[:, vocab_size // 2 :] = logits[:, : vocab_size - vocab_size // 2].clone()  # every value twice
    expected = [row.index(max(row)) for row in logits.tolist()]
    assert argmax_rows(logits).tolist() == expected


def test_argmax_of_rows_that_are_not_finite() -> None:
    inf, nan = torch.inf, torch.nan
    rows = [[1.0, -inf, 2.0], [1.0, inf, 0.0], [nan, 1.0, 0.0], [1.0, nan, 2.0], [-inf, -inf, -inf], [-inf, -5.0, -inf]]
    assert argmax_rows(torch.tensor(rows)).tolist() == [2, -1, -1, -1, -1, 1]


@pytest.mark.parametrize("temperature", [1e-45, 1e-30, 1e-4])
def test_the_smallest_temperatures_leave_the_largest_logits(temperature: float) -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, -2e38]])
    assert softmax_at(logits, torch.tensor([temperature])).tolist() == [[0, 0.5, 0.5, 0]]


def test_rows_of_logits_that_are_not_finite() -> None:
    inf, nan = torch.inf, torch.nan
    logits = torch.tensor([[1.0, -inf, 1.0], [1.0, inf, 0.0], [nan, 1.0, 0.0], [-inf, -inf, -inf], [0.0, 0.0, 0.0]])
    probs = softmax_at(logits, torch.ones(5))
    assert probs[0].tolist() == [0.5, 0, 0.5]
    assert probs[1:4].isnan().any(-1).all()
    torch.testing.assert_close(probs[4], torch.full((3,), 1 / 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("count", [1, 3, 9])
@pytest.mark.parametrize(("num_rows", "vocab_size"), [(1, 5), (7, 64), (12, 700)])
def test_the_best_children_are_the_most_likely_tokens(num_rows: int, vocab_size: int, count: int, dtype: torch.dtype) -> None:
    logits = random_logits(num_rows, vocab_size, dtype)
    temperatures = torch.linspace(0.05, 2, num_rows)
    tokens, logprobs = best_children(logits, count, temperatures)
    expected = (logits.double() / temperatures.double()[:, None]).log_softmax(-1)
    kept = min(count, vocab_size)
    best = expected.sort(-1, descending=True).values[:, :kept]
    torch.testing.assert_close(logprobs[:, :kept].double(), best, rtol=1e-4, atol=2e-4)
    torch.testing.assert_close(expected.gather(1, tokens[:, :kept]), best, rtol=0, atol=0)
    assert all(len(set(row)) == kept for row in tokens[:, :kept].tolist())
    assert (logprobs[:, kept:] == -torch.inf).all() and logprobs.max() <= 0


def test_best_children_of_rows_that_are_not_finite() -> None:
    inf, nan = torch.inf, torch.nan
    rows = [[1.0, -inf, 2.0], [1.0, inf, 0.0], [nan, 1.0, 0.0], [-inf, -inf, -inf]]
    tokens, logprobs = best_children(torch.tensor(rows), 3, torch.full((4,), 1e-30))
    assert tokens[0, :2].tolist() == [2, 0] and logprobs[0, 0] == 0 and logprobs[0, 1] < -1e29 and logprobs[0, 2] == -inf
    assert not logprobs[1:, 0].isfinite().any()
    assert (tokens >= 0).all() and (tokens < 3).all()


@pytest.mark.parametrize("vocab_size", [1, 3, 512, 513, 1500])
def test_a_draw_is_the_first_entry_whose_running_sum_exceeds_the_uniform_number(vocab_size: int) -> None:
    num_rows = 200
    probs = random_logits(num_rows, vocab_size).exp()
    probs[:, ::3] *= 0 if vocab_size > 1 else 1
    seeds, positions = np.arange(num_rows, dtype=np.uint64) << np.uint64(57), np.arange(num_rows)
    uniform = torch.from_numpy(philox_uniform(seeds, positions, Purpose.CORRUPT))
    tokens = draw_compiled(LazyProbs(probs, None), seeds, positions, Purpose.CORRUPT)
    tokens = draw(probs, uniform) if tokens is None else tokens
    sums = torch.cat((torch.zeros(num_rows, 1, dtype=torch.float64), probs.double().cumsum(-1)), 1)
    heights = uniform * sums[:, -1]
    rows = torch.arange(num_rows)
    slack = 1e-12 * sums[:, -1]
    assert (sums[rows, tokens] <= heights + slack).all() and (heights < sums[rows, tokens + 1] + slack).all()
    assert (probs[rows, tokens] > 0).all()


def test_the_compiled_draw_from_logits_is_that_from_their_probabilities() -> None:
    logits, temperatures = random_logits(50, 900, torch.bfloat16), torch.linspace(0.5, 3, 50)
    logits[7] = torch.nan
    keys = np.arange(50, dtype=np.uint64), np.arange(50)
    from_logits = draw_compiled(LazyProbs(logits, temperatures), *keys, Purpose.SAMPLE)
    from_probs = draw_compiled(LazyProbs(softmax_at(logits, temperatures), None), *keys, Purpose.SAMPLE)
    assert (from_logits is None) == (from_probs is None)
    if from_logits is not None and from_probs is not None:
        assert torch.equal(from_logits, from_probs) and from_logits[7] == -1


@pytest.mark.parametrize("uniform", [2.0**-53, 1 - 2.0**-53])
def test_impossible_entries_never_come_out_at_the_ends(uniform: float) -> None:
    probs = torch.zeros(1, 1200)
    probs[0, 300], probs[0, 900] = 1e-30, 3.0
    assert draw(probs, torch.tensor([uniform], dtype=torch.float64)).tolist() == [900]
    probs[0, 300] = 1.0
    assert draw(probs, torch.tensor([uniform], dtype=torch.float64)).tolist() == [300 if uniform < 0.5 else 900]


def test_probabilities_of_any_float_dtype_are_drawn_from() -> None:
    probs = torch.zeros(3, 40)
    probs[:, 30] = 1.0
    uniform = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        assert draw(probs.to(dtype), uniform).tolist() == [30, 30, 30]
        assert draw(probs.to(dtype), uniform.float()).tolist() == [30, 30, 30]
