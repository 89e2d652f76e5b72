"""Whole sequences sampled by the engine with speculation come from exactly the target's distribution.

The vocabulary has eight tokens, so that every sequence can be enumerated and its probability computed by transformers, under every
option that changes logits or cuts the distribution. The draft knows nothing of options that change logits; rejection mends that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import count, product
from pathlib import Path
from random import Random
from runpy import run_path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from back_ends import make_back_end
from numpy.typing import NDArray
from proposals import trees_on_host
from scipy import stats
from slow_logits import by_last_token, slow_probs, slow_transform
from stepping import make_engine, run_all
from text_tools import make_letter_tokenizer
from tiny_models import make_model, reference_logits
from torch import Tensor
from zoo import Zoo

from titan.adaptive.controller import Controller
from titan.adaptive.load import Decision, Load
from titan.core.growth import Worth
from titan.core.random import Purpose
from titan.core.sampling_params import SamplingParams
from titan.core.step import StepPlan
from titan.core.trees import EMPTY_TREE, DraftTree, DraftTrees
from titan.draft.base import CachelessDrafter
from titan.draft.vocabulary import VocabularyMap
from titan.engine import Engine
from titan.kernels.interfaces import Backend, Verified
from titan.kernels.torch.trees import AcceptanceRule, Outcome, RuledTrees, TreeToVerify, lossless
from titan.verify import options

VOCAB_SIZE = 8
LENGTH = 3
MORE = 3  # tokens behind those that are looked at, so that the first trees have nodes to branch
NUM_SEQUENCES = 1300
NUM_ON_PYTORCH = 700  # whose rules take long: the p-value of `no_residual` is then 1e-8
PROMPT = [3, 6, 1, 1, 5]
STOP = 4

SAMPLINGS: dict[str, dict[str, Any]] = {
    "hot": {"temperature": 1.7},
    "min_p": {"temperature": 2.0, "min_p": 0.1},
    "cuts": {"temperature": 1.5, "top_k": 6, "top_p": 0.9, "min_p": 0.05},
    "repetition": {"repetition_penalty": 1.9},
    "presence_frequency": {"presence_penalty": 1.9, "frequency_penalty": -0.6},
    "logit_bias": {"logit_bias": {1: 1.2, 5: -100, 7: -0.6}},
    "processor": {"logits_processors": [by_last_token]},
    "min_tokens": {"min_tokens": 2, "stop_token_ids": [STOP], "logit_bias": {STOP: 1.5}},
}
SAMPLINGS["words"] = {"allowed_token_ids": [0, 1, 2, 3, 5, 6, 7], "bad_words": ["6", "12", "33", "727"], "temperature": 1.3}
SAMPLINGS["all"] = {"temperature": 1.4, "top_k": 7, "top_p": 0.95, "min_p": 0.02, "repetition_penalty": 1.2}
SAMPLINGS["all"] |= {"presence_penalty": 0.4, "frequency_penalty": 0.5} | SAMPLINGS["processor"] | SAMPLINGS["min_tokens"]

PROPOSALS: dict[str, dict[str, Any]] = {
    "most likely": {"draft_tree": "chain", "draft_sampling": "greedy"},
    "chain": {"draft_tree": "chain"},
    "auto": {"draft_tree": "auto"},
    "dynamic": {"draft_tree": "dynamic"},
    "shape": {"draft_tree": [-1, -1, 0, 0, 1], "max_draft_tokens": 5},
}
"""All but the first are sampled."""


class Bush(CachelessDrafter):
    """Proposes small branching trees of tokens that are drawn anew for every prefix."""

    name = "bush"
    max_draft_tokens = 5
    parents = np.array([-1, -1, -1, 0, 1], np.int32)

    def propose(self, plan: StepPlan) -> list[DraftTree]:
        trees = []
        for request, budget in zip(plan.requests, plan.draft_budgets, strict=True):
            first, second, third = Random(str(request.token_ids)).sample(range(VOCAB_SIZE), 3)
            token_ids = np.array([first, second, third, first, third])
            trees.append(DraftTree(token_ids[:budget], self.parents[:budget]))
        return trees


class Sampled(NamedTuple):
    outputs: list[list[int]]  # the first tokens of each sequence
    accepted_per_depth: list[int]
    proposed_per_depth: list[int]


def sample(
    zoo: Zoo,
    sampling: str,
    proposal: str | Bush | None,
    num_sequences: int = NUM_SEQUENCES,
    *,
    draft: str = "eight~",
    seed_every: int = 1,
    backend: Backend | None = None,
    watch: Callable[[Engine], None] = lambda _: None,
    target: str | None = None,
    **options: Any,
) -> Sampled:
    """As many sequences, of seeds 0, 1, ...

    Args:
        seed_every: the first of so many sequences has a seed of its own, the others none; 0: none has.
        target: a folder with the weights of "eight"; ``draft`` is then a folder, too.
    """
    choice = {"draft_sampling": "sampled"} | PROPOSALS[proposal] if isinstance(proposal, str) else {}
    pool: dict[str, Any] = {"max_batch_size": 128, "block_size": 8, "num_kv_blocks": 300, "max_waiting_requests": num_sequences}
    pool["enable_prefix_caching"] = False  # no block of the prompt is full
    drafter = (draft if target else zoo.path(draft)) if isinstance(proposal, str) else proposal
    engine = make_engine(target or zoo.path("eight"), drafter, backend=backend, seed=5, **pool | choice | options)
    watch(engine)
    seeds = [seed if seed_every and seed % seed_every == 0 else None for seed in range(num_sequences)]
    params = [params_of(sampling, seed) for seed in seeds]
    outputs = run_all(engine, [PROMPT] * num_sequences, params, before_step=lambda _: end_what_is_long_enough(engine))
    metrics = engine.metrics()
    return Sampled([output[:LENGTH] for output in outputs], metrics.accepted_per_depth, metrics.proposed_per_depth)


@cache
def params_of(sampling: str, seed: int | None) -> SamplingParams:
    return SamplingParams(max_tokens=LENGTH + MORE, seed=seed, ignore_eos=True, **SAMPLINGS[sampling])


def end_what_is_long_enough(engine: Engine) -> None:
    """What would follow is not looked at."""
    for request in tuple(engine.scheduler.running):
        if request.num_output_tokens >= LENGTH:
            engine.scheduler.abort(request)


@cache
def exact_logits(zoo: Zoo, output: tuple[int, ...]) -> Tensor:
    return reference_logits(zoo.model("eight"), [*PROMPT, *output])[-1]


@cache
def exact_probs(zoo: Zoo, sampling: str | None) -> NDArray[np.float64]:
    """Probability of each sequence, in lexical order, token by token; `None`: without options."""
    params = SamplingParams(max_tokens=LENGTH + MORE, **SAMPLINGS[sampling] if sampling else {})

    @cache
    def next_probs(output: tuple[int, ...]) -> Tensor:
        logits = exact_logits(zoo, output).double()
        return slow_probs(slow_transform(logits, params, PROMPT, output, params.stop_token_ids or ()), params)

    sequences = product(range(VOCAB_SIZE), repeat=LENGTH)
    return np.array([np.prod([float(next_probs(s[:i])[s[i]]) for i in range(LENGTH)]) for s in sequences])


def p_value(zoo: Zoo, sampled: Sampled, sampling: str | None) -> float:
    """Chi-square of the sequences; those expected less than 5 times are counted together; 0 if one is impossible."""
    probs, outputs = exact_probs(zoo, sampling), np.array(sampled.outputs)
    observed = np.bincount(outputs @ VOCAB_SIZE ** np.arange(LENGTH)[::-1], minlength=len(probs)).astype(float)
    if observed[probs == 0].sum():
        return 0.0
    expected = probs / probs.sum() * len(outputs)
    common = expected >= 5
    observed, expected = (np.append(values[common], values[~common].sum()) for values in (observed, expected))
    return float(stats.chisquare(observed[expected > 0], expected[expected > 0]).pvalue)


CASES = [
    *((sampling, proposal) for sampling in SAMPLINGS for proposal in ("bush", "shape")),
    *((sampling, proposal) for sampling in ("cuts", "all") for proposal in ("most likely", "chain", "auto")),
    ("cuts", "dynamic"),  # sampled, it grows as "auto" does
]


@pytest.mark.long_where(
    *(f"{each}-shape" for each in ("hot", "min_p", "min_tokens", "presence_frequency", "logit_bias", "processor")),
    *(f"all-{each}" for each in ("most likely", "chain", "auto")),
    "cuts-dynamic",
)
@pytest.mark.parametrize(("sampling", "proposal"), CASES)
def test_speculation_keeps_the_targets_distribution(zoo: Zoo, sampling: str, proposal: str) -> None:
    """The negative control: it is not that of the target without the options. And what is not sampled changes no sequence."""
    sampled = sample(zoo, sampling, Bush() if proposal == "bush" else proposal)
    assert sampled.accepted_per_depth[0] > NUM_SEQUENCES / 2 and sampled.accepted_per_depth[1] > 15, "nothing is tested"
    assert p_value(zoo, sampled, sampling) > 1e-3
    assert p_value(zoo, sampled, None) < 1e-6
    if proposal in ("bush", "most likely"):
        assert sample(zoo, sampling, None, 200).outputs == sampled.outputs[:200]


@pytest.mark.parametrize(("proposal", "back_end"), [("chain", "torch"), ("shape", "torch"), ("dynamic", "cpu")])
def test_drafts_of_a_poor_model_keep_the_distribution_too(zoo: Zoo, proposal: str, back_end: str) -> None:
    """Of requests without seeds."""
    backend, num_sequences = make_back_end(back_end), NUM_ON_PYTORCH if back_end == "torch" else NUM_SEQUENCES
    sampled = sample(zoo, "cuts", proposal, num_sequences, draft="eight_other", seed_every=0, backend=backend)
    assert sampled.accepted_per_depth[0] < 0.65 * sampled.proposed_per_depth[0], "residuals are sampled from"
    assert p_value(zoo, sampled, "cuts") > 1e-3


@pytest.fixture(scope="module")
def letters(zoo: Zoo, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The target "eight" whose tokens are letters, and a draft of its own that has six of them, by other ids, and three others."""
    folder: Path = tmp_path_factory.mktemp("letters")
    zoo.model("eight").save_pretrained(folder / "target")
    make_letter_tokenizer("abcdefgh", "bytes").save_pretrained(folder / "target")
    make_model(folder / "draft", vocab_size=9, num_hidden_layers=1, eos_token_id=2, seed=12)
    make_letter_tokenizer("xgayfchbz", "pieces").save_pretrained(folder / "draft")
    return {"target": str(folder / "target"), "draft": str(folder / "draft"), "seed_every": 0}


OTHER_VOCABULARY = [("hot", "auto", "cpu"), ("hot", "shape", "cpu"), ("cuts", "dynamic", "cpu"), ("hot", "chain", "torch")]


@pytest.mark.parametrize(("sampling", "proposal", "back_end"), OTHER_VOCABULARY)
def test_drafts_of_another_vocabulary_keep_the_distribution_too(
    zoo: Zoo, letters: dict[str, Any], sampling: str, proposal: str, back_end: str
) -> None:
    num_sequences = NUM_ON_PYTORCH if back_end == "torch" else NUM_SEQUENCES // 2
    sampled = sample(zoo, sampling, proposal, num_sequences, backend=make_back_end(back_end), **letters)
    assert 150 < sampled.accepted_per_depth[0] < 0.65 * sampled.proposed_per_depth[0]
    assert p_value(zoo, sampled, sampling) > 1e-3


@pytest.mark.parametrize("mistake", ["not renormalised", "by other ids"])
def test_the_chi_square_notices_a_q_of_other_tokens(
    zoo: Zoo, letters: dict[str, Any], mistake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft's distribution over all of its tokens, of which a part is not the target's; or tokens of a wrong map."""
    to_target = VocabularyMap.to_target

    def mistaken(vocabulary: VocabularyMap, trees: DraftTrees) -> DraftTrees:
        mapped = to_target(vocabulary, trees)
        probs = mapped.draft_probs
        if probs is None:
            return mapped
        return replace(mapped, draft_probs=0.6 * probs if mistake == "not renormalised" else probs.roll(1, 1).contiguous())

    monkeypatch.setattr(VocabularyMap, "to_target", mistaken)
    assert p_value(zoo, sample(zoo, "hot", "chain", **letters), "hot") < 1e-6


class Peeking:
    """Lets a request have no drafts at all if it does not like the token that was sampled first."""

    def __init__(self, engine: Engine) -> None:
        drafter: Any = engine.drafter
        self.propose, self.backend, drafter.propose = drafter.propose, engine.backend, self

    def __call__(self, plan: StepPlan) -> list[DraftTree]:
        trees = trees_on_host(self.backend, self.propose(plan))
        return [EMPTY_TREE if tree.num_nodes and tree.token_ids[0] % 2 else tree for tree in trees]


def spiteful(controller: Controller, load: Load, has_room: bool) -> Decision:
    """No drafts where most were accepted, and the more the more of them were not; room for drafts is kept as for an optimum."""
    rejected = [1 - (each.counts.num_accepted + 1) / (each.counts.num_expected + 2) for each in load.candidates]
    num_nodes = [
        min(each.max_nodes, int(6 * share)) if share > 0.45 else 0 for each, share in zip(load.candidates, rejected, strict=True)
    ]
    optimum = replace(controller.optimum, num_nodes=[each.max_nodes for each in load.candidates])
    controller.compared = replace(controller.compared, optimum=optimum)
    if not has_room:
        num_nodes = [0] * len(num_nodes)
    worth = Worth(agreement=0.9, acceptance=0.8, node_price=0.05, row_price=0.01, pass_price=0.3)
    worths = [worth if each.stops_early and num_nodes[i] else None for i, each in enumerate(load.candidates)]
    return Decision(num_nodes, [each.max_nodes if worths[i] else num_nodes[i] for i, each in enumerate(load.candidates)], worths)


@pytest.mark.long_where("None-0")
@pytest.mark.parametrize(("watch", "seed_every"), [(None, 0), (None, 2), (Peeking, 0)])
def test_how_much_is_drafted_may_depend_on_anything_but_the_sampled_tokens(
    zoo: Zoo, watch: Any, seed_every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sampled trees may grow beside beams that end where they do not pay: those of requests with a seed of their own."""
    monkeypatch.setattr(Controller, "_decide", spiteful)
    kinds, look = Counter[Any](), watch or (lambda _: None)

    def observe(engine: Engine) -> None:
        look(engine)
        engine.observers.append(lambda _, acceptance: kinds.update(np.repeat(acceptance.trees.is_sampled, acceptance.trees.counts)))

    options: dict[str, Any] = {"speculation": "adaptive", "draft_sampling": "auto"}
    sampled = sample(zoo, "cuts", "auto", watch=observe, seed_every=seed_every, **options)
    assert kinds[True] > NUM_SEQUENCES / 2 and (kinds[False] > NUM_SEQUENCES / 2) == (seed_every > 0)
    assert sampled.accepted_per_depth[1] > 30 and sampled.proposed_per_depth[0] < 0.9 * NUM_SEQUENCES * (LENGTH + MORE - 1)
    assert (p_value(zoo, sampled, "cuts") > 1e-3) == (watch is None)


def first_child(tree: TreeToVerify) -> Outcome:
    """Takes what was sampled first for good."""
    path: list[int] = []
    while children := tree.children(path[-1] if path else -1):
        path.append(children[0])
    return Outcome(path, tree.sample(tree.p(path[-1] if path else -1), len(path), Purpose.SAMPLE))


EXAMPLE = run_path(str(Path(__file__).parents[2] / "examples" / "block_verification.py"))


@pytest.mark.long_where("lossless")
@pytest.mark.parametrize("rule", [lossless, EXAMPLE["block_verification"], first_child])
def test_a_rule_of_ones_own_is_judged(zoo: Zoo, rule: AcceptanceRule) -> None:
    def use(engine: Engine) -> None:
        engine.backend.trees = RuledTrees(engine.backend, rule)
        engine.drafter.policy = EXAMPLE["OwnNumbers"]("chain", "sampled", 6)  # type: ignore[attr-defined]

    sampled = sample(zoo, "hot", "chain", 1000, draft="eight_other", backend=make_back_end("cpu"), watch=use)
    assert (p_value(zoo, sampled, "hot") > 1e-3) == (rule is not first_child)
    assert sum(sampled.accepted_per_depth) > (2750 if rule is EXAMPLE["block_verification"] else 2250)


def careless(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Now and then a draft token is taken for good."""
    verify, num_walks = backend.trees.verify, count()

    def mistaken(logits: Tensor, trees: DraftTrees, rows: NDArray[np.int64], *others: Any) -> Verified:
        verified = verify(logits, trees, rows, *others)
        paths = torch.nn.functional.pad(verified.paths, (0, 1), value=-1)
        for i, num_nodes in enumerate(trees.counts[rows].tolist()):
            if next(num_walks) % 5 == 0 and num_nodes and (paths[i] < 0).all():
                paths[i, 0] = 0
        return verified._replace(paths=paths)

    monkeypatch.setattr(backend.trees, "verify", mistaken)


def flat_q(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another q than the one that was sampled from."""
    verify = backend.trees.verify

    def mistaken(logits: Tensor, trees: DraftTrees, *others: Any) -> Verified:
        probs = trees.draft_probs
        flat = None if probs is None else (probs + 0.2) / (1 + 0.2 * VOCAB_SIZE)
        return verify(logits, replace(trees, draft_probs=flat), *others)

    monkeypatch.setattr(backend.trees, "verify", mistaken)


def no_residual(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """The target's p where the residual should be."""
    attempt = TreeToVerify._try
    monkeypatch.setattr(TreeToVerify, "_try", lambda tree, children, p, q, depth: (attempt(tree, children, p, q, depth)[0], p))


def no_paths(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Options overlook the drafted path."""
    monkeypatch.setattr(options, "_paths", lambda tree, first: {first + row: [] for row in range(tree.num_nodes + 1)})


@pytest.mark.long_where("flat_q-hot-chain", "no_paths-repetition", "no_paths-presence_frequency")
@pytest.mark.parametrize(
    ("mistake", "sampling", "proposal", "back_end"),
    [
        (careless, "hot", "most likely", "cpu"),
        (flat_q, "hot", "chain", "torch"),
        (flat_q, "hot", "shape", "cpu"),
        (no_residual, "hot", "chain", "torch"),
        (no_paths, "repetition", "bush", "cpu"),
        (no_paths, "presence_frequency", "bush", "cpu"),
        (no_paths, "words", "bush", "cpu"),
    ],
)
def test_the_chi_square_notices_mistakes(
    zoo: Zoo, mistake: Callable[..., None], sampling: str, proposal: str, back_end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, num_sequences = make_back_end(back_end), NUM_ON_PYTORCH if back_end == "torch" else NUM_SEQUENCES
    if mistake is no_paths and sampling != "words":  # most drafted paths are short; impossible words show soon
        num_sequences *= 2
    mistake(backend, monkeypatch)
    drafts = Bush() if proposal == "bush" else proposal
    sampled = sample(zoo, sampling, drafts, num_sequences, draft="eight_other", backend=backend)
    assert p_value(zoo, sampled, sampling) < 1e-6
