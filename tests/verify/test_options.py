"""Options that change logits, with speculation: each holds at every node, with the drafts before it taken for committed.

At temperature 0 the output is that of a loop that asks transformers for one token after the other and applies the options
itself; above, whole sequences over eight tokens come from the distribution that this loop enumerates.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product
from random import Random
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from back_ends import ON_HOST, make_back_end
from numpy.typing import NDArray
from scipy import stats
from slow_logits import slow_probs, slow_transform
from stepping import make_engine, run_all
from tiny_models import reference_logits
from torch import Tensor
from zoo import EOS_TOKEN_IDS, Zoo, random_prompts

from titan.core.request import Request
from titan.core.sampling_params import SamplingParams
from titan.core.step import StepPlan
from titan.core.trees import EMPTY_TREE, DraftTree, DraftTrees
from titan.draft.base import NoDrafter
from titan.draft.policy import DraftPolicy
from titan.draft.registry import DraftSpec
from titan.draft.replay import ReplayDrafter
from titan.kernels.interfaces import Backend, Verified
from titan.kernels.torch import trees as torch_trees
from titan.verify import options


def by_last_token(token_ids: list[int], logits: Tensor) -> Tensor:
    """Likes the tokens that have the parity of the last one."""
    return logits + 1.5 * (torch.arange(len(logits)) % 2 == token_ids[-1] % 2)


GREEDY: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.3},
    "presence": {"presence_penalty": 1.2},
    "frequency": {"frequency_penalty": 0.4},
    "encouraged": {"presence_penalty": -2.0, "frequency_penalty": -0.3, "repetition_penalty": 1.05},
    "logit_bias": {"logit_bias": {7: 4.0, 20: 5, 33: -100.0}},
    "processor": {"logits_processors": [by_last_token]},
    "min_tokens": {"min_tokens": 18, "logit_bias": dict.fromkeys(EOS_TOKEN_IDS, 6.0)},
    "all": {
        "logit_bias": {11: 2.0, **dict.fromkeys(EOS_TOKEN_IDS, 6.0)},
        "logits_processors": [by_last_token],
        "min_tokens": 12,
        "repetition_penalty": 1.1,
        "presence_penalty": -1.0,
        "frequency_penalty": 0.3,
    },
}
MAX_TOKENS = 24
PROMPTS = random_prompts(5, seed=21, max_len=25)


class SlowLoop:
    """Greedy decoding, one pass of transformers per token."""

    def __init__(self, zoo: Zoo) -> None:
        self.zoo = zoo
        self.outputs = cache(self._outputs)

    def _outputs(self, name: str) -> list[list[int]]:
        params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, **GREEDY[name])
        return [self._output(params, prompt) for prompt in PROMPTS]

    def _output(self, params: SamplingParams, prompt: list[int]) -> list[int]:
        output: list[int] = []
        while len(output) < MAX_TOKENS and not (output and output[-1] in EOS_TOKEN_IDS):
            logits = reference_logits(self.zoo.model("llama"), prompt + output)[-1]
            scores = slow_transform(logits, params, prompt, output, EOS_TOKEN_IDS)
            best = scores.topk(2).values
            assert best[0] - best[1] > 1e-4, "a near-tie: rounding could decide"
            output.append(int(scores.argmax()))
        return output


@pytest.fixture(scope="module")
def slow_loop(zoo: Zoo) -> SlowLoop:
    return SlowLoop(zoo)


def run_greedy(zoo: Zoo, name: str, draft: DraftSpec) -> tuple[list[list[int]], float]:
    engine = make_engine(zoo.path("llama"), draft, num_kv_blocks=64, max_batch_size=4)
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, **GREEDY[name])
    return run_all(engine, PROMPTS, [params] * len(PROMPTS)), engine.metrics().mean_acceptance_length


def replay(outputs: list[list[int]], acceptance: float) -> ReplayDrafter:
    recordings = {tuple(prompt): output for prompt, output in zip(PROMPTS, outputs, strict=True)}
    return ReplayDrafter(recordings, acceptance=acceptance, vocab_size=131, max_draft_tokens=6)


@pytest.mark.parametrize("name", GREEDY)
def test_greedy_output_is_that_of_a_loop_over_transformers(zoo: Zoo, slow_loop: SlowLoop, name: str) -> None:
    expected = slow_loop.outputs(name)
    assert expected != slow_loop.outputs("logit_bias" if name != "logit_bias" else "processor")
    assert run_greedy(zoo, name, None)[0] == expected
    for draft, low in ((replay(expected, 1.0), 4.0), (replay(expected, 0.8), 2.0), (zoo.path("llama~"), 1.0)):
        outputs, acceptance_length = run_greedy(zoo, name, draft)
        assert outputs == expected
        assert acceptance_length >= low


@pytest.mark.parametrize("name", ["repetition", "presence", "frequency", "encouraged", "processor", "all"])
def test_the_loop_notices_options_that_overlook_the_drafted_path(
    zoo: Zoo, slow_loop: SlowLoop, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: drafted tokens repeat within one path, and if they did not count, the output would differ."""
    expected = slow_loop.outputs(name)
    _forget_paths(monkeypatch)
    assert run_greedy(zoo, name, replay(expected, 1.0))[0] != expected


def _forget_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "_paths", lambda tree, first: {first + row: [] for row in range(tree.num_nodes + 1)})


VOCAB_SIZE = 8
LENGTH = 3
MORE = 3  # tokens behind those that are looked at, so that the first trees have nodes to branch
NUM_SEQUENCES = 2000
PROMPT = [3, 6, 1, 1, 5]
STOP = 4
SAMPLED: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.9},
    "presence_frequency": {"presence_penalty": 1.9, "frequency_penalty": -0.6},
    "logit_bias": {"logit_bias": {1: 1.2, 5: -100, 7: -0.6}},
    "processor": {"logits_processors": [by_last_token]},
    "min_tokens": {"min_tokens": 2, "stop_token_ids": [STOP], "logit_bias": {STOP: 1.5}},
    "all": {
        "temperature": 1.4,
        "top_k": 7,
        "top_p": 0.95,
        "min_p": 0.02,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.5,
        "logit_bias": {2: 0.9},
        "logits_processors": [by_last_token],
        "min_tokens": 2,
        "stop_token_ids": [STOP],
    },
}
FILTERED: dict[str, dict[str, Any]] = {
    "plain": {},
    "filtered": {"temperature": 1.5, "top_k": 6, "top_p": 0.9, "min_p": 0.05},
}


class Bush(NoDrafter):
    """Proposes small branching trees of tokens that are drawn anew for every prefix."""

    name = "bush"
    max_draft_tokens = 5
    parents = np.array([-1, -1, -1, 0, 1], np.int32)

    def propose(self, plan: StepPlan) -> list[DraftTree]:
        return [self._tree(request, budget) for request, budget in zip(plan.requests, plan.draft_budgets, strict=True)]

    def _tree(self, request: Request, budget: int) -> DraftTree:
        if budget == 0:
            return EMPTY_TREE
        random = Random(str(request.token_ids))
        first, second, third = random.sample(range(VOCAB_SIZE), 3)
        token_ids = [first, second, third, first, third]
        return DraftTree(np.array(token_ids[:budget]), self.parents[:budget])


def params_of(name: str, **options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=LENGTH + MORE, **((SAMPLED | FILTERED)[name] | options))


class Sampled(NamedTuple):
    outputs: list[list[int]]  # the first tokens of each sequence
    accepted_per_depth: list[int]
    proposed_per_depth: list[int]


def sample(
    zoo: Zoo, name: str, draft: DraftSpec, num_sequences: int, *, backend: Backend | None = None, **engine_options: Any
) -> Sampled:
    """As many sequences, of seeds 0, 1, ..."""
    pool: dict[str, Any] = {"max_batch_size": 128, "block_size": 8, "num_kv_blocks": 300, "max_waiting_requests": 5000}
    engine = make_engine(zoo.path("eight"), draft, backend=backend, **pool, **engine_options)
    params = [params_of(name, seed=seed, ignore_eos=True) for seed in range(num_sequences)]
    outputs = run_all(engine, [PROMPT] * num_sequences, params)
    metrics = engine.metrics()
    return Sampled([output[:LENGTH] for output in outputs], metrics.accepted_per_depth, metrics.proposed_per_depth)


def exact_distribution(zoo: Zoo, params: SamplingParams) -> NDArray[np.float64]:
    """Probability of each sequence, in lexical order, token by token."""
    stop_token_ids = params.stop_token_ids or ()

    @cache
    def next_probs(output: tuple[int, ...]) -> Tensor:
        logits = reference_logits(zoo.model("eight"), [*PROMPT, *output])[-1].double()
        return slow_probs(slow_transform(logits, params, PROMPT, output, stop_token_ids), params)

    sequences = product(range(VOCAB_SIZE), repeat=LENGTH)
    return np.array([np.prod([float(next_probs(s[:i])[s[i]]) for i in range(LENGTH)]) for s in sequences])


def p_value(outputs: list[list[int]], probs: NDArray[np.float64]) -> float:
    """Chi-square of the sequences; those expected less than 5 times are counted together; 0 if one is impossible."""
    observed = np.bincount(np.array(outputs) @ VOCAB_SIZE ** np.arange(LENGTH)[::-1], minlength=len(probs)).astype(float)
    if observed[probs == 0].sum():
        return 0.0
    expected = probs / probs.sum() * len(outputs)
    common = expected >= 5
    observed, expected = (np.append(values[common], values[~common].sum()) for values in (observed, expected))
    return float(stats.chisquare(observed[expected > 0], expected[expected > 0]).pvalue)


@pytest.mark.parametrize("name", SAMPLED)
def test_sampled_sequences_come_from_the_targets_distribution_under_the_option(zoo: Zoo, name: str) -> None:
    """With two negative controls: the distribution without the option, and, for the same seeds, the run without drafts."""
    outputs, accepted_per_depth, _ = sample(zoo, name, Bush(), NUM_SEQUENCES)
    assert accepted_per_depth[0] > NUM_SEQUENCES / 2 and accepted_per_depth[1] > 30, "hardly any was accepted: nothing is tested"
    assert p_value(outputs, exact_distribution(zoo, params_of(name))) > 1e-3
    assert p_value(outputs, exact_distribution(zoo, SamplingParams())) < 1e-6
    assert sample(zoo, name, None, 300) == (outputs[:300], [], []), "a seed gives the same tokens with and without drafts"


TREES: dict[str, dict[str, Any]] = {
    "chain": {"draft_tree": "chain"},
    "auto": {"draft_tree": "auto"},
    "dynamic": {"draft_tree": "dynamic"},
    "bushy": {"draft_tree": [-1, -1, 0, 0, 1], "max_draft_tokens": 5},
}


@pytest.mark.parametrize("shape", TREES)
@pytest.mark.parametrize("name", ["plain", "filtered", *SAMPLED])
def test_drafts_that_are_sampled_keep_the_targets_distribution_under_the_option(zoo: Zoo, name: str, shape: str) -> None:
    """The draft model knows nothing of options that change logits; rejection makes up for it."""
    outputs, accepted_per_depth, _ = sample(zoo, name, zoo.path("eight~"), NUM_SEQUENCES, draft_sampling="sampled", **TREES[shape])
    assert accepted_per_depth[0] > NUM_SEQUENCES / 2 and accepted_per_depth[1] > 100
    assert p_value(outputs, exact_distribution(zoo, params_of(name))) > 1e-3
    assert p_value(outputs, exact_distribution(zoo, SamplingParams(temperature=0.8 if name == "plain" else 1.0))) < 1e-6


@pytest.mark.parametrize("shape", TREES)
def test_drafts_of_a_poor_model_keep_the_distribution_too(zoo: Zoo, shape: str) -> None:
    outputs, accepted_per_depth, proposed_per_depth = sample(
        zoo, "plain", zoo.path("eight_other"), 2 * NUM_SEQUENCES, draft_sampling="sampled", **TREES[shape]
    )
    assert accepted_per_depth[0] < 0.65 * proposed_per_depth[0], "many are rejected, so that residuals are sampled from"
    assert p_value(outputs, exact_distribution(zoo, params_of("plain"))) > 1e-3


@pytest.mark.parametrize("shape", ["chain", "bushy"])
def test_pytorch_keeps_the_distribution_too(zoo: Zoo, shape: str) -> None:
    """Where there is a compiler, the other tests here run C++."""
    options: dict[str, Any] = {"draft_sampling": "sampled", "backend": make_back_end("torch")}
    outputs, *_ = sample(zoo, "filtered", zoo.path("eight_other"), NUM_SEQUENCES, **options, **TREES[shape])
    assert p_value(outputs, exact_distribution(zoo, params_of("filtered"))) > 1e-3


@pytest.mark.parametrize("shape", TREES)
def test_a_request_may_change_between_sampled_and_most_likely_drafts(zoo: Zoo, shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `draft_sampling="auto"` does, here at every step."""
    kinds: list[bool] = []

    def alternate(_: DraftPolicy, request: Request) -> bool:
        kinds.append(request.draft_history.num_drafts % 2 == request.seed % 2)
        return kinds[-1]

    monkeypatch.setattr(DraftPolicy, "_is_sampled", alternate)
    outputs, *_ = sample(zoo, "filtered", zoo.path("eight_other"), 2 * NUM_SEQUENCES, draft_sampling="auto", **TREES[shape])
    assert min(sum(kinds), len(kinds) - sum(kinds)) > NUM_SEQUENCES
    assert p_value(outputs, exact_distribution(zoo, params_of("filtered"))) > 1e-3


@pytest.mark.parametrize("shape", ["chain", "bushy"])
@pytest.mark.parametrize("back_end", ON_HOST)
def test_the_chi_square_notices_a_wrong_q(zoo: Zoo, back_end: str, shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A negative control of rejection: another q than the one that was sampled from."""
    backend = make_back_end(back_end)
    verify = backend.trees.verify

    def with_flat_q(logits: Tensor, trees: DraftTrees, *others: Any) -> Verified:
        probs = trees.draft_probs
        flat = None if probs is None else (probs + 0.2) / (1 + 0.2 * VOCAB_SIZE)
        return verify(logits, replace(trees, draft_probs=flat), *others)

    monkeypatch.setattr(backend.trees, "verify", with_flat_q)
    poor = zoo.path("eight_other")
    outputs, *_ = sample(zoo, "plain", poor, 2 * NUM_SEQUENCES, backend=backend, draft_sampling="sampled", **TREES[shape])
    assert p_value(outputs, exact_distribution(zoo, params_of("plain"))) < 1e-6


@pytest.mark.parametrize("shape", ["chain", "bushy"])
def test_the_chi_square_notices_a_missing_residual(zoo: Zoo, shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A negative control of rejection: p where the residual should be."""
    attempt = torch_trees._Tree._try
    monkeypatch.setattr(torch_trees._Tree, "_try", lambda *args: (attempt(*args)[0], 0.0))
    options: dict[str, Any] = {"draft_sampling": "sampled", "backend": make_back_end("torch")}
    outputs, *_ = sample(zoo, "plain", zoo.path("eight_other"), 2 * NUM_SEQUENCES, **options, **TREES[shape])
    assert p_value(outputs, exact_distribution(zoo, params_of("plain"))) < 1e-6


@pytest.mark.parametrize("name", ["repetition", "presence_frequency"])
def test_the_chi_square_notices_options_that_overlook_the_drafted_path(
    zoo: Zoo, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _forget_paths(monkeypatch)
    outputs, *_ = sample(zoo, name, Bush(), 2 * NUM_SEQUENCES)
    assert p_value(outputs, exact_distribution(zoo, params_of(name))) < 1e-6
