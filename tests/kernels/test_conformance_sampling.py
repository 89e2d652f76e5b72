"""The most likely tokens, distributions and samples: every back end against their definitions in float64."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from acceptance_reference import Option, reference_probs, sampling_rows
from back_ends import make_back_end
from exact_rules import inverse_cdf
from interpreted import DEVICE, ON_CUDA, triton_backend
from torch import Tensor

from titan.core.random import Purpose, philox_uniform
from titan.kernels.interfaces import Backend
from titan.kernels.triton import row_distribution
from titan.kernels.triton.sample_rows import sample_rows
from titan.kernels.triton.tree_walk import VerifiedTrees, walk_matches

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
INF, NAN = torch.inf, torch.nan
CHUNK, GROUP = row_distribution.CHUNK.value, row_distribution.GROUP.value
ALL_OPTIONS = list(product((0.0, 0.7, 5.0), (0, 3, 50), (1.0, 0.9, 0.3), (0.0, 0.1)))


def random_logits(backend: Backend, num_rows: int, vocab_size: int, dtype: torch.dtype = torch.float32, scale: float = 2) -> Tensor:
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(0)) * scale
    return logits.to(backend.device, dtype)


def assert_same_distribution(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == torch.float32
    assert torch.equal(actual > 0, expected > 0)
    torch.testing.assert_close(actual.double(), expected, rtol=2e-5, atol=1e-9)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "vocab_size"), [(1, 1), (2, 5), (60, 1031), (9, 20000)])
def test_argmax_is_the_first_of_the_largest(backend: Backend, dtype: torch.dtype, num_rows: int, vocab_size: int) -> None:
    logits = random_logits(backend, num_rows, vocab_size, dtype, scale=8)
    logits[:, vocab_size // 2 :] = logits[:, : vocab_size - vocab_size // 2].clone()  # every value twice
    assert backend.sampling.argmax(logits).tolist() == [row.index(max(row)) for row in logits.tolist()]


def test_argmax_of_rows_that_are_not_finite(backend: Backend) -> None:
    rows = [[1.0, -INF, 2.0], [1.0, INF, 0.0], [NAN, 1.0, 0.0], [1.0, NAN, 2.0], [-INF, -INF, -INF], [-INF, -5.0, -INF]]
    assert backend.sampling.argmax(torch.tensor(rows, device=backend.device)).tolist() == [2, -1, -1, -1, -1, 1]


def test_argmax_of_no_rows_and_of_rows_that_lie_apart(backend: Backend) -> None:
    """Of a vocabulary that some kernels look at in chunks; NaN in the last one is found."""
    logits = random_logits(backend, 6, 9000)
    logits[4, 8999] = NAN
    assert backend.sampling.argmax(logits[:0, :8000]).tolist() == []
    assert backend.sampling.argmax(logits[::2, :8000]).tolist() == [row.index(max(row)) for row in logits[::2, :8000].tolist()]
    assert [token == -1 for token in backend.sampling.argmax(logits[::2]).tolist()] == [False, False, True]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 3, 9])
@pytest.mark.parametrize(("num_rows", "vocab_size"), [(1, 5), (7, 64), (12, 700), (2, 9000)])
def test_top_candidates_are_the_most_likely_tokens(
    backend: Backend, num_rows: int, vocab_size: int, count: int, dtype: torch.dtype
) -> None:
    logits = random_logits(backend, num_rows, vocab_size, dtype, scale=8)
    temperatures = torch.linspace(0.05, 2, num_rows, device=backend.device)
    tokens, logprobs = backend.sampling.top_candidates(logits, count, temperatures)
    exact = (logits.double() / temperatures.double()[:, None]).log_softmax(-1)
    kept = min(count, vocab_size)
    best = exact.sort(-1, descending=True).values[:, :kept]
    torch.testing.assert_close(logprobs[:, :kept].double(), best, rtol=1e-4, atol=2e-4)
    torch.testing.assert_close(exact.gather(1, tokens[:, :kept]), best, rtol=0, atol=0)
    assert all(len(set(row)) == kept for row in tokens[:, :kept].tolist())
    assert tokens.shape == logprobs.shape == (num_rows, count) and logprobs.max() <= 0 and (logprobs[:, kept:] == -INF).all()


def test_top_candidates_of_rows_that_are_not_finite(backend: Backend) -> None:
    rows = torch.tensor([[1.0, -INF, 2.0], [1.0, INF, 0.0], [NAN, 1.0, 0.0], [-INF, -INF, -INF]], device=backend.device)
    tokens, logprobs = backend.sampling.top_candidates(rows, 3, torch.full((4,), 1e-30, device=backend.device))
    assert tokens[0, :2].tolist() == [2, 0] and logprobs[0, 0] == 0 and logprobs[0, 1] < -1e29 and logprobs[0, 2] == -INF
    assert not logprobs[1:, 0].isfinite().any()
    assert (tokens >= 0).all() and (tokens < 3).all()


UNCUT = [(temperature, 0, 1.0, 0.0) for temperature in (0.3, 0.7, 1.0, 2.9)]


@pytest.mark.parametrize(
    ("vocab_size", "options", "dtype"),
    [
        (7, ALL_OPTIONS[::5], torch.float32),
        (100, ALL_OPTIONS, torch.float32),
        (5000, ALL_OPTIONS[1::7], torch.float32),
        *product((5, 1031), (UNCUT,), DTYPES),
    ],
)
def test_probs_of_all_options_side_by_side(
    backend: Backend, vocab_size: int, options: Sequence[Option], dtype: torch.dtype
) -> None:
    logits = random_logits(backend, len(options), vocab_size, dtype)
    before = logits.clone()
    probs = backend.sampling.probs(logits, sampling_rows(options))
    assert_same_distribution(probs.cpu(), reference_probs(logits, options))
    assert torch.equal(logits, before)


@pytest.mark.long_where("triton-5000")
@pytest.mark.parametrize("vocab_size", [300, 5000])
def test_of_equal_logits_top_k_keeps_the_first_whatever_other_rows_keep(backend: Backend, vocab_size: int) -> None:
    limits = (1, 5, 40, vocab_size - 1, 0, 120, vocab_size)
    options = [(0.9, top_k, 1.0, 0.0) for top_k in limits]
    logits = torch.randint(0, 4, (len(options), vocab_size), generator=torch.Generator().manual_seed(0))
    logits = logits.to(backend.device, torch.bfloat16)
    probs = backend.sampling.probs(logits, sampling_rows(options))
    assert_same_distribution(probs.cpu(), reference_probs(logits, options))
    for i, option in enumerate(options):
        assert torch.equal(backend.sampling.probs(logits[i : i + 1], sampling_rows([option]))[0] > 0, probs[i] > 0)


@pytest.mark.parametrize("option", [(1.0, 2400, 1.0, 0.0), (3.0, 0, 0.98, 0.0), (2.0, 3000, 0.97, 0.0)])
def test_cuts_that_keep_thousands_of_tokens(backend: Backend, option: Option) -> None:
    logits = random_logits(backend, 1, 6000, scale=1)
    actual, expected = backend.sampling.probs(logits, sampling_rows([option])).cpu(), reference_probs(logits, [option])
    assert 2048 < (expected > 0).sum() < 6000
    # thousands of tokens are added up in float32: the last of them may differ
    assert ((actual > 0) != (expected > 0)).sum() <= (3 if option[2] < 1 else 0)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=1e-4)


def test_tokens_at_the_very_edge_of_a_cut(backend: Backend) -> None:
    """A nucleus ends where its mass is top-p; min-p keeps what is just as likely as it asks."""
    logits = torch.tensor([[0.0, -80.0, 0.0, 0.0, 0.0]] * 4, device=backend.device)
    options = [(1.0, 0, 0.5, 0.0), (2.0, 0, 0.75, 0.0), (1.0, 0, 1.0, 1.0), (1.0, 2, 1.0, 1.0)]
    probs = backend.sampling.probs(logits, sampling_rows(options)).cpu().sort(descending=True).values
    third = 1 / 3
    expected = [[0.5, 0.5, 0, 0, 0], [third, third, third, 0, 0], [0.25, 0.25, 0.25, 0.25, 0], [0.5, 0.5, 0, 0, 0]]
    torch.testing.assert_close(probs, torch.tensor(expected))


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # numpy's in the interpreter
@pytest.mark.parametrize("temperature", [1e-3, 1e-4, 1e-30, 1e-44, 1e-45])
def test_a_tiny_temperature_or_top_p_leaves_the_most_likely_tokens(backend: Backend, temperature: float) -> None:
    logits = random_logits(backend, 5, 30, scale=100)
    logits[4, :4] = torch.tensor([1.0, 3e3, 3e3, -2e38])
    options = [(temperature, 0, 1.0, 0.0), (temperature, 5, 0.9, 0.0), (temperature, 0, 1.0, 0.2), (9.0, 0, 1e-44, 0.0)]
    probs = backend.sampling.probs(logits, sampling_rows([*options, options[0]]))
    expected = torch.nn.functional.one_hot(logits.argmax(-1), 30).float()
    expected[4, 1:3] = 0.5
    assert torch.equal(probs, expected)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # numpy's in the interpreter
def test_impossible_tokens_stay_impossible_and_broken_rows_are_marked(backend: Backend) -> None:
    options = [(1.0, 0, 1.0, 0.0), (1.0, 4, 1.0, 0.0), (1.0, 0, 0.99, 0.0), (1.0, 0, 1.0, 0.1), (0.0, 0, 1.0, 0.0)]
    logits = random_logits(backend, 2 * len(options) + 1, 5)
    logits[:5, [0, 3]] = -INF  # fewer tokens are left than top-k
    logits[5, 2] = logits[8, 4] = logits[9, 0] = NAN
    logits[6, 1] = logits[10, 2] = INF
    logits[7] = -INF
    probs = backend.sampling.probs(logits, sampling_rows([*options, *options, options[0]])).cpu()
    assert_same_distribution(probs[:5], reference_probs(logits[:5], options))
    assert probs[5:].isnan().all()


def test_a_row_does_not_depend_on_its_neighbours(backend: Backend) -> None:
    options = ALL_OPTIONS[::4]
    logits = random_logits(backend, len(options), 50)
    together = backend.sampling.probs(logits, sampling_rows(options))
    alone = [backend.sampling.probs(logits[i : i + 1], sampling_rows([option])) for i, option in enumerate(options)]
    assert torch.equal(together, torch.cat(alone))


@pytest.mark.long_where("triton-3-options0-1", "triton-40-options1-5", "triton-1500-options2-1")
@pytest.mark.parametrize("most", [1, 5])
@pytest.mark.parametrize(
    ("vocab_size", "options"),
    [
        (3, [(1.0, 0, 1.0, 0.0), (1.0, 2, 1.0, 0.0), (5.0, 0, 1.0, 0.0)] * 4),
        (40, ALL_OPTIONS[12::2]),
        (1500, [(0.7, 0, 1.0, 0.0), (1.3, 3, 1.0, 0.0), (5.0, 0, 0.95, 0.0)] * 4),
    ],
)
def test_children_are_sampled_without_replacement(backend: Backend, vocab_size: int, options: Sequence[Option], most: int) -> None:
    """By inverse CDFs, at the random numbers of their ranks; -1 where no token is left, and nothing else is written."""
    rng, n = np.random.default_rng(0), len(options)
    logits, rows, num_children = random_logits(backend, n, vocab_size), sampling_rows(options), rng.integers(1, most + 1, n)
    places = rng.permutation(n + 3)[:n]
    probs = torch.full((n + 3, vocab_size), 7.0, device=backend.device)
    children = torch.full((n + 3, most), 77, device=backend.device)
    backend.sampling.sample_children(logits, rows, num_children, torch.from_numpy(places).to(backend.device), probs, children)
    assert_same_distribution(probs.cpu()[places], reference_probs(logits, options))
    others = np.setdiff1d(np.arange(n + 3), places)
    assert (probs[others] == 7).all() and (children[others] == 77).all()
    num_short = 0
    for i, place in enumerate(places.tolist()):
        left, expected = probs[place].double().cpu().numpy().copy(), []
        key = int(rows.options["seed"][i]), int(rows.options["position"][i])
        for rank in range(int(num_children[i])):
            uniform = float(philox_uniform(*key, Purpose.DRAFT, sibling=rank))
            expected.append(inverse_cdf(left, uniform) if left.sum() > 0 else -1)
            left[expected[-1]] = 0
        num_short += -1 in expected
        assert children[place, : len(expected)].tolist() == expected
        assert set(children[place, len(expected) :].tolist()) <= {-1, 77}
    assert num_short > 0 or vocab_size > 40 or most == 1


def test_no_rows_have_no_distributions(backend: Backend) -> None:
    assert backend.sampling.probs(torch.zeros(0, 9, device=backend.device), sampling_rows([])).shape == (0, 9)


# Equal logits are cut by token id, whatever the chunk. To Triton, rows may lie apart.


def assert_cut_by_token_id(backend: Backend, logits: Tensor, options: Sequence[Option]) -> Tensor:
    expected = reference_probs(logits, options)
    assert_same_distribution(backend.sampling.probs(logits.to(backend.device), sampling_rows(options)).cpu(), expected)
    return expected > 0


def test_equal_logits_are_cut_by_token_id(backend: Backend) -> None:
    """Of five values that many tokens share each, the cuts fall on one of them."""
    top_k, top_p = [(1.0, 4, 1.0, 0.0), (2.0, 23, 1.0, 0.0)], [(1.0, 0, 0.37, 0.0), (3.0, 40, 0.51, 0.0), (3.0, 9, 0.9, 0.3)]
    options = [*top_k, *top_p, (1.0, 0, 1.0, 1.0), (1.0, 3, 1.0, 1.0)]
    logits = torch.randint(-2, 3, (len(options), 61), generator=torch.Generator().manual_seed(3)).float()
    logits[logits == 0] = -0.0
    logits[:, 5:30:7] = 0.0  # the same number
    logits[1] = -logits[1].abs()  # -0.0 at most
    logits[3, ::2] = -INF
    rows = zip(logits, assert_cut_by_token_id(backend, logits, options), strict=True)
    is_cut = [bool((row[~is_kept] == row[is_kept].min()).any()) for row, is_kept in rows]
    assert sum(is_cut) >= 5, "hardly a cut falls between equal logits: nothing is tested"


def test_equal_logits_are_counted_across_chunks(backend: Backend) -> None:
    logits = torch.zeros(3, 2 * CHUNK + 500)
    logits[:, [1, 4000, CHUNK + 2]] = 1.0
    is_kept = assert_cut_by_token_id(backend, logits, [(1.0, 2 * CHUNK + 9, 1.0, 0.0), (1.0, 5, 1.0, 0.0), (0.0, 0, 1.0, 0.0)])
    assert is_kept[1].nonzero()[:, 0].tolist() == [0, 1, 2, 4000, CHUNK + 2]
    logits[:, ::3], logits[:, 1::3], logits[:, 2::2] = -0.0, -1.0, 1.0  # more of each pair than fit into registers
    assert_cut_by_token_id(backend, logits, [(1.0, 2 * CHUNK + 9, 1.0, 0.0), (2.0, CHUNK + 1700, 1.0, 0.0), (9.0, 0, 0.875, 0.0)])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_logits_in_strided_rows_are_read_as_they_are(dtype: torch.dtype) -> None:
    options = [(0.7, 3, 0.9, 0.0), (5.0, 0, 0.3, 0.1), (0.7, 50, 1.0, 0.1), (5.0, 0, 1.0, 0.0)]
    wide = torch.full((len(options), 400), NAN, dtype=dtype, device=DEVICE)
    logits = wide[:, 40:340].copy_(random_logits(triton_backend(), len(options), 300))
    assert_cut_by_token_id(triton_backend(), logits, options)


@pytest.mark.parametrize(("num_rows", "vocab_size"), [(7, 2 * CHUNK + 900), pytest.param(56, 128_256, marks=ON_CUDA)])
def test_distributions_and_draws_over_a_real_vocabulary(num_rows: int, vocab_size: int) -> None:
    """Half the sum of the differences is the most that rounding moves a draw by; many logits are equal."""
    cuts = [(0.75, 50, 1.0, 0.0), (1.0, 0, 0.875, 0.0), (0.75, 1000, 0.9375, 0.0), (1.25, 0, 1.0, 0.03125), (0.5, 20, 0.75, 0.125)]
    options = ([(0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), *cuts] * num_rows)[:num_rows]
    backend, rows, bound = triton_backend(), sampling_rows(options), 2e-5
    logits = random_logits(backend, num_rows, vocab_size, torch.bfloat16, scale=3)
    exact = reference_probs(logits, options)
    assert (backend.sampling.probs(logits, rows).cpu() - exact).abs().sum(-1).max() / 2 <= bound
    seeds, positions = rows.options["seed"], rows.options["position"]
    distributions, numbers = backend.sampling.distributions(logits, rows, seeds.view(np.int64), positions)
    tokens = sample_rows(distributions, *numbers).cpu()[:, None]
    uniform = torch.from_numpy(philox_uniform(seeds, positions, Purpose.SAMPLE))
    mass, end = (each.gather(1, tokens)[:, 0] for each in (exact, exact.cumsum(-1)))
    assert (mass > 0).all() and (end - mass - bound <= uniform).all() and (uniform <= end + bound).all()


@pytest.mark.parametrize("scale", [0.05, 0.5, 3.0])
def test_compiled_cuts_over_a_real_vocabulary(scale: float) -> None:
    """Whether nearly all tokens are needed for top-p or few, of which many are equal."""
    options = [(0.75, 50, 1.0, 0.0), (1.0, 0, 0.875, 0.0), (0.75, 5000, 0.9375, 0.0), (0.5, 20, 0.75, 0.125), (1.0, 0, 0.1, 0.01)]
    backend = make_back_end("cpu")
    logits = random_logits(backend, len(options), 128_256, torch.bfloat16, scale=scale)
    probs, exact = backend.sampling.probs(logits, sampling_rows(options)), reference_probs(logits, options)
    assert (probs - exact).abs().sum(-1).max() / 2 <= 2e-5
    assert [*((probs > 0) != (exact > 0)).sum(-1)[[0, 3]]] == [0, 0]


def test_cuts_read_only_the_groups_that_can_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """However large the vocabulary: once the chunks are summed up, what lies far below no longer counts."""
    options = [(1.0, 3, 1.0, 0.0), (1.0, 0, 0.9, 0.0), (1.0, 0, 1.0, 0.5), (1.0, 4, 0.9, 0.1)]
    logits = random_logits(triton_backend(), len(options), CHUNK + 500, scale=1)
    logits[:, CHUNK : CHUNK + 4 * GROUP : GROUP] += 30.0
    expected = reference_probs(logits, options)
    kernel = row_distribution._cut_rows_kernel

    class Emptied:
        def __getitem__(self, grid: tuple[int]) -> Any:
            logits[:, :CHUNK] = logits[:, CHUNK + 4 * GROUP :] = NAN
            return kernel[grid]

    monkeypatch.setattr(row_distribution, "_cut_rows_kernel", Emptied())
    of_rows, _ = triton_backend().sampling.distributions(logits, sampling_rows(options))
    logits.nan_to_num_(-INF)
    assert_same_distribution(row_distribution.normalized_probs(of_rows).cpu(), expected)


def test_no_rows_and_no_trees_are_no_work_on_triton() -> None:
    no_longs, start_loc = torch.zeros(0, dtype=torch.int64, device=DEVICE), torch.zeros(1, dtype=torch.int32, device=DEVICE)
    none, _ = triton_backend().sampling.distributions(torch.zeros(0, 9, device=DEVICE), sampling_rows([]))
    assert sample_rows(none, no_longs, no_longs).tolist() == []
    result = VerifiedTrees.of(no_longs, no_longs.int(), start_loc, max_nodes=4)
    walk_matches(result, no_longs)
    assert result.paths.shape == (0, 4) and len(result.final_tokens) == 0
