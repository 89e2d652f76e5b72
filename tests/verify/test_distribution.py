"""Whole sequences sampled by the engine with speculation come from exactly the target's distribution.

The vocabulary has eight tokens, so that every sequence can be enumerated and its probability computed by transformers.
"""

from __future__ import annotations

from functools import cache
from itertools import count, product
from typing import Any

import numpy as np
import pytest
import torch
from back_ends import ON_HOST, make_back_end
from numpy.typing import NDArray
from scipy import stats
from stepping import make_engine, run_all
from torch import Tensor
from transformers import MinPLogitsWarper, PreTrainedModel, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper
from zoo import Zoo

from titan.core.sampling_params import SamplingParams
from titan.core.sampling_rows import SamplingRows
from titan.core.trees import DraftTrees
from titan.kernels.interfaces import Backend, Verified

VOCAB_SIZE = 8
LENGTH = 3
NUM_SEQUENCES = 4096
PROMPT = [3, 6, 1, 1, 5]
SEQUENCES = np.array(list(product(range(VOCAB_SIZE), repeat=LENGTH)))

SAMPLINGS: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 1.0},
    "hot": {"temperature": 1.7},
    "top_k_top_p": {"temperature": 1.5, "top_k": 6, "top_p": 0.9},
    "min_p": {"temperature": 2.0, "min_p": 0.1},
}


@torch.no_grad()
def exact_distribution(
    model: PreTrainedModel, *, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> NDArray[np.float64]:
    """Probability of each of `SEQUENCES` after `PROMPT`."""
    prompts = torch.tensor(PROMPT).expand(len(SEQUENCES), -1)
    logits = model(torch.cat((prompts, torch.tensor(SEQUENCES)), 1)).logits[:, len(PROMPT) - 1 : -1].double()
    scores = TemperatureLogitsWarper(temperature)(prompts, logits.reshape(-1, VOCAB_SIZE))
    for warper in (
        *([TopKLogitsWarper(top_k)] if top_k else []),
        *([TopPLogitsWarper(top_p)] if top_p < 1 else []),
        *([MinPLogitsWarper(min_p)] if min_p else []),
    ):
        scores = warper(prompts, scores)
    probs = scores.softmax(-1).view(len(SEQUENCES), LENGTH, VOCAB_SIZE)
    return probs.gather(2, torch.tensor(SEQUENCES)[:, :, None])[:, :, 0].prod(1).numpy()  # type: ignore[no-any-return]


def p_value(outputs: list[list[int]], probs: NDArray[np.float64]) -> float:
    """Chi-square of the sequences against their probabilities; those expected less than 5 times are counted together."""
    index = np.array(outputs) @ VOCAB_SIZE ** np.arange(LENGTH)[::-1]
    observed = np.bincount(index, minlength=len(probs)).astype(float)
    assert observed[probs == 0].sum() == 0, "a sequence that is impossible"
    expected = probs / probs.sum() * len(outputs)
    common = expected >= 5
    observed, expected = (np.append(values[common], values[~common].sum()) for values in (observed, expected))
    if expected[-1] == 0:
        observed, expected = observed[:-1], expected[:-1]
    return float(stats.chisquare(observed, expected).pvalue)


class Sampler:
    """Samples sequences with the engine, one request per seed."""

    def __init__(self, zoo: Zoo) -> None:
        self.zoo = zoo
        self.sample = cache(self._sample)

    def _sample(
        self, sampling: str, draft: str | None, has_seed: bool, backend: Backend | None = None
    ) -> tuple[list[list[int]], float]:
        """The outputs and the mean acceptance length."""
        engine = make_engine(
            self.zoo.path("eight"),
            draft if draft in (None, "ngram") else self.zoo.path(draft),
            backend=backend, max_batch_size=128, block_size=8, num_kv_blocks=300, max_waiting_requests=NUM_SEQUENCES, seed=5,
        )  # fmt: skip
        options = SAMPLINGS[sampling]
        params = [
            SamplingParams(max_tokens=LENGTH, ignore_eos=True, seed=seed if has_seed else None, **options)
            for seed in range(NUM_SEQUENCES)
        ]
        outputs = run_all(engine, [PROMPT] * NUM_SEQUENCES, params)
        return outputs, engine.metrics().mean_acceptance_length


@pytest.fixture(scope="module")
def sampler(zoo: Zoo) -> Sampler:
    return Sampler(zoo)


@pytest.mark.parametrize(("draft", "has_seed"), [("eight", True), ("eight~", True), ("eight~", False)])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_speculation_keeps_the_targets_distribution(sampler: Sampler, sampling: str, draft: str, has_seed: bool) -> None:
    outputs, acceptance_length = sampler.sample(sampling, draft, has_seed)
    assert acceptance_length > 1.15, "hardly any draft token was accepted: nothing is tested"
    assert p_value(outputs, exact_distribution(sampler.zoo.model("eight"), **SAMPLINGS[sampling])) > 1e-3


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_pytorch_keeps_the_targets_distribution(zoo: Zoo, sampling: str) -> None:
    """Where there is a compiler, the other tests here run C++."""
    outputs, acceptance_length = Sampler(zoo)._sample(sampling, "eight~", True, make_back_end("torch"))
    assert acceptance_length > 1.15
    assert p_value(outputs, exact_distribution(zoo.model("eight"), **SAMPLINGS[sampling])) > 1e-3


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_the_chi_square_notices_a_distribution_that_is_slightly_wrong(sampler: Sampler, sampling: str) -> None:
    """The negative control: the same outputs do not pass for those of another temperature."""
    outputs, _ = sampler.sample(sampling, "eight~", True)
    options = SAMPLINGS[sampling]
    wrong = {"temperature": options["temperature"] * 1.25} | {key: value for key, value in options.items() if key != "temperature"}
    assert p_value(outputs, exact_distribution(sampler.zoo.model("eight"), **wrong)) < 1e-6


@pytest.mark.parametrize("back_end", ON_HOST)
def test_the_chi_square_notices_a_lossy_acceptance_rule(zoo: Zoo, back_end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control of the rule: now and then a draft token is taken for good."""
    backend, num_walks = make_back_end(back_end), count()
    verify = backend.trees.verify

    def careless(logits: Tensor, trees: DraftTrees, rows: NDArray[np.int64], sampling: SamplingRows) -> Verified:
        verified = verify(logits, trees, rows, sampling)
        paths = torch.nn.functional.pad(verified.paths, (0, 1), value=-1)
        for i, num_nodes in enumerate(trees.counts[rows].tolist()):
            if next(num_walks) % 5 == 0 and num_nodes and (paths[i] < 0).all():
                paths[i, 0] = 0
        return verified._replace(paths=paths)

    monkeypatch.setattr(backend.trees, "verify", careless)
    outputs, _ = Sampler(zoo)._sample("plain", "eight~", True, backend)
    assert p_value(outputs, exact_distribution(zoo.model("eight"), **SAMPLINGS["plain"])) < 1e-6


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_seed_gives_the_same_sequence_with_and_without_speculation(sampler: Sampler, sampling: str) -> None:
    outputs, acceptance_length = sampler.sample(sampling, None, True)
    assert acceptance_length == 1.0
    assert sampler.sample(sampling, "eight~", True)[0] == outputs
