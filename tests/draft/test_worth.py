"""Growth that ends where it does not pay, against the law as `titan.core.growth.Worth` states it, in plain Python.

The draft's logits are a table: what its attention and its MLP say is multiplied by 0, so that only the last token counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import exp, inf
from pathlib import Path
from typing import Any

import pytest
import torch
from back_ends import make_back_end
from proposals import paths_of, trees_on_host
from tiny_models import make_model, reference_logits
from torch import Tensor
from twins import GrowthTwins

from titan.core.growth import BeamSpec, Worth
from titan.kernels.cpu.runner import CompiledRunner

VOCAB_SIZE = 24
UNPRICED = Worth(agreement=1.0, acceptance=1.0, node_price=-1.0, row_price=0.0, pass_price=1e-9)
USUAL = Worth(agreement=0.9, acceptance=0.7, node_price=0.02, row_price=0.01, pass_price=0.15)
SPECS = [
    BeamSpec(20, 5, 3, 4, 0.7, USUAL),
    BeamSpec(12, 7, 1, 3, 0.5, USUAL),
    BeamSpec(30, 6, 3, 4, 1.0, USUAL._replace(agreement=0.7, acceptance=0.9)),
    BeamSpec(6, 4, 2, 2, 0.9, USUAL._replace(node_price=0.05, pass_price=0.3)),
]
Path_ = tuple[int, ...]
Tree = dict[Path_, float]  # scores by the tokens from the root down


def exceeds(value: float, bound: float) -> bool:
    assert abs(value - bound) > 1e-4 * abs(bound), "rounding could decide"
    return value > bound


def grow(table: Tensor, roots: Sequence[int], specs: Sequence[BeamSpec]) -> tuple[list[Tree], int]:
    """The trees that grow together, and the number of depths that were fed."""
    trees: list[Tree] = [{} for _ in specs]
    frontiers: list[Tree] = [{(): 0.0} for _ in specs]
    depth, gain = 0, inf
    while gain > 0 and exceeds(gain, 1.0):
        depth, gain = depth + 1, 0.0
        for i, spec in enumerate(specs):
            worth = spec.worth or UNPRICED
            found: Tree = {}
            for path, score in frontiers[i].items():
                logprobs = (table[[roots[i], *path][-1]].double() / spec.temperature).log_softmax(-1).tolist()
                best = sorted(range(len(logprobs)), key=logprobs.__getitem__, reverse=True)[: spec.num_children]
                found |= {(*path, token): score + logprobs[token] for token in best}
            values = {path: worth.agreement**depth * exp(score) for path, score in found.items()}
            trees[i] |= {path: score for path, score in found.items() if exceeds(values[path], worth.node_price)}
            fed = sorted(found, key=found.__getitem__, reverse=True)[: spec.width if depth < spec.depth else 0]
            price = worth.node_price + worth.row_price
            fed = [path for path in fed if exceeds(worth.acceptance * values[path], price)]
            gain += sum((worth.acceptance * values[path] - price) / worth.pass_price for path in fed)
            frontiers[i] = {path: found[path] for path in fed}
    best_of = (sorted(tree, key=tree.__getitem__, reverse=True)[: spec.max_nodes] for tree, spec in zip(trees, specs, strict=True))
    return [{path: tree[path] for path in best} for tree, best in zip(trees, best_of, strict=True)], depth - 1


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensor]:
    """A checkpoint and its logits after each token, [vocab, vocab]."""
    folder = tmp_path_factory.mktemp("table")
    model = make_model(folder, vocab_size=VOCAB_SIZE, num_hidden_layers=1)
    for name, parameter in model.named_parameters():
        parameter.data *= 0 if "o_proj" in name or "down_proj" in name else 1.5 if "lm_head" in name else 1
    model.save_pretrained(folder)
    return folder, torch.stack([reference_logits(model, [token])[0] for token in range(VOCAB_SIZE)])


def changed(**prices: float) -> list[BeamSpec]:
    return [replace(spec, worth=(spec.worth or USUAL)._replace(**prices)) for spec in SPECS]


CASES: dict[str, tuple[list[BeamSpec], int]] = {  # and the number of depths that are fed
    "at once": (changed(pass_price=9.0), 0),
    "in the middle": (SPECS, 3),
    "passes that hardly one pays for": (changed(pass_price=0.9), 1),
    "rows that hardly one pays for": (changed(row_price=0.25), 1),
    "nodes that are not kept": (changed(node_price=0.2), 2),
    "never": (changed(node_price=0.0, row_price=0.0, pass_price=1e-9), 6),
    "one alone": (SPECS[1:2], 2),
    "beside one that is as deep as it may be": ([replace(changed(pass_price=0.001)[0], depth=1), *changed(pass_price=9.0)], 0),
    "beside one that goes on": ([*SPECS, BeamSpec(8, 6, 2, 3, 1.0)], 5),
    "beside one that ends before": ([*SPECS, BeamSpec(8, 2, 2, 3, 1.0)], 3),
}


def count_passes(runner: Any) -> list[int]:
    """A list that receives 1 for each pass that is a call of its own."""
    counts: list[int] = []
    forward = runner.forward
    runner.forward = lambda batch: (counts.append(1), forward(batch))[1]
    return counts


@pytest.mark.long_where(*(f"triton-{each}" for each in ("never", "in the middle", "beside one that ends", "beside one that goes")))
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("back_end", ["torch", "cpu", "triton"])
def test_trees_are_those_of_the_law(back_end: str, case: str, draft: tuple[Path, Tensor]) -> None:
    """Their nodes and scores; and no pass is made that does not pay."""
    (folder, table), (specs, num_depths) = draft, CASES[case]
    twins = GrowthTwins(str(folder), VOCAB_SIZE, make_back_end(back_end))
    feeds = twins.feeds(specs)
    expected, num_fed = grow(table, [feed.token_ids[-1] for feed in feeds], specs)
    assert num_fed == num_depths
    passes, trees = count_passes(twins.runner), twins.grow(feeds)
    if isinstance(twins.runner, CompiledRunner):  # all of them are one call
        assert not passes and trees.growth is not None
        passes.append(trees.growth.num_passes)
    assert sum(passes) == 1 + num_fed
    assert all(count <= spec.num_children * (1 + spec.width * num_fed) for count, spec in zip(trees.counts, specs, strict=False))
    for tree, paths in zip(trees_on_host(twins.backend, trees), expected, strict=False):
        assert tree.scores is not None
        assert dict(zip(paths_of(tree), tree.scores.tolist(), strict=True)) == pytest.approx(paths, abs=1e-4)
