"""From what became of each tree to the acceptance of a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from titan.core.step import Acceptance, StepPlan
from titan.core.trees import DraftTree
from titan.verify.logprobs import emitted_logprobs


class Found(NamedTuple):
    """What became of one tree."""

    path: list[int]  # accepted nodes, from the root down
    final_token: int  # -1 where none could be drawn
    match: tuple[float, float] | None = None  # of a tree that was drawn, see `Acceptance.matches`


def assemble(
    plan: StepPlan,
    trees: list[DraftTree],
    start_loc: NDArray[np.int64],
    logits: Tensor,
    found: Mapping[int, Found],
    errors: Mapping[int, str],
) -> Acceptance:
    """Put together what was found.

    Args:
        plan: the step.
        trees: one per row of the plan.
        start_loc: [rows of the plan + 1], prefix sums of the rows of logits.
        logits: [L, vocab].
        found: by row of the plan, where its root was reached.
        errors: by row of logits, why it cannot be drawn from, where that is known.
    """
    acceptance = Acceptance(trees, [], [], [])
    for i, (tree, first_row) in enumerate(zip(trees, start_loc.tolist(), strict=False)):
        path: list[int] = []
        emitted: list[int] = []
        error = None
        if i in found:
            path, final_token, match = found[i]
            token_ids = tree.token_ids.tolist()
            emitted = [token_ids[node] for node in path]
            if final_token >= 0:
                emitted.append(final_token)
            else:
                last_row = first_row + 1 + path[-1] if path else first_row
                error = errors.get(last_row, "the target's logits are not finite")
            if match is not None and tree.num_nodes:
                acceptance.matches[i] = match
        acceptance.paths.append(path)
        acceptance.token_ids.append(emitted)
        acceptance.errors.append(error)
    acceptance.logprobs.update(emitted_logprobs(plan.requests, start_loc, acceptance.paths, acceptance.token_ids, logits))
    return acceptance
