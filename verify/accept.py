"""Verification: which draft tokens are accepted, and which token follows them.

The rules are stated in `titan.kernels.torch.trees`; the back end applies them. `launch` starts it, and `collect` copies its results
to the host, in one copy that waits for the device: the only one of a step, unless a request asks for logprobs, has nodes and
options that look at drafted prefixes (penalties, logit bias, processors, ``min_tokens``), or has logits that nothing can be sampled
from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isnan

import numpy as np
from torch import Tensor

from titan.core.arrays import Ints
from titan.core.sampling_rows import SamplingRows
from titan.core.step import Acceptance, StepPlan
from titan.core.trees import DraftTrees
from titan.kernels.interfaces import Backend, Verified
from titan.verify.logprobs import emitted_logprobs
from titan.verify.options import explain_row, looks_at_prefix, transform_rows


@dataclass(frozen=True, slots=True, eq=False)
class Launched:
    """A launched verification, which the device may not have finished."""

    plan: StepPlan
    trees: DraftTrees
    host_trees: DraftTrees | None  # if they were already needed on the host
    start_loc: Ints  # [rows of the plan + 1], prefix sums of the rows of logits
    logits: Tensor  # [L, vocab], as the model computed them
    transformed: Tensor  # [L, vocab], as the requests' options left them
    rows: Ints  # [S], rows of the plan whose roots were reached
    verified: Verified | None  # of these rows; None: there are none
    errors: Mapping[int, str]  # of the users' processors, by row of logits


def launch(backend: Backend, plan: StepPlan, trees: DraftTrees, start_loc: Ints, logits: Tensor) -> Launched:
    """Launch the verification of a step, which chooses the accepted path and the final token of every request.

    Args:
        backend: the one that computed the logits.
        plan: the step.
        trees: of its rows.
        start_loc: [rows of the plan + 1], prefix sums of the rows of logits.
        logits: [L, vocab], rows of a request in order: root, then nodes.
    """
    counts = start_loc[1:] - start_loc[:-1]
    rows = np.flatnonzero(counts)
    if not len(rows):
        return Launched(plan, trees, None, start_loc, logits, logits, rows, None, {})
    host_trees, used, errors = None, logits, dict[int, str]()
    reached = rows.tolist()
    looking = [i for i in reached if looks_at_prefix(plan.requests[i])]
    if looking:
        host_trees = trees.on_host(backend.download(trees.nodes)) if counts[looking].max() > 1 else None
        used, errors = transform_rows(logits, plan.requests, host_trees, start_loc, backend.upload)
    requests = [plan.requests[i] for i in reached]
    sampling = SamplingRows.of((request.params, request.seed, request.num_tokens) for request in requests)
    verified = backend.trees.verify(used, trees, rows, sampling)
    return Launched(plan, trees, host_trees, start_loc, logits, used, rows, verified, errors)


def collect(backend: Backend, launched: Launched) -> Acceptance:
    """Copy the results of a verification to the host.

    Args:
        backend: the one that verifies.
        launched: from `launch`.
    """
    plan, start_loc, verified = launched.plan, launched.start_loc, launched.verified
    num_rows, trees = len(plan.requests), launched.host_trees
    if trees is None and not launched.trees.num_nodes:
        trees = DraftTrees.empty(num_rows)
    found = [] if verified is None else [each for each in verified if each is not None]
    tensors = [*found, *(launched.trees.nodes if trees is None else ())]
    fetched = backend.download(tensors) if tensors else []  # none in a step of prefill chunks
    trees = trees or launched.trees.on_host(fetched[len(found) :])
    acceptance = Acceptance(trees, [[] for _ in range(num_rows)], [[] for _ in range(num_rows)], [None] * num_rows)
    if verified is not None:
        token_ids, first_nodes = trees.nodes.token_ids.tolist(), trees.start_loc.tolist()
        rows = launched.rows.tolist()
        lengths = (fetched[0] >= 0).sum(1).tolist()
        for i, nodes, length, final_token in zip(rows, fetched[0].tolist(), lengths, fetched[1].tolist(), strict=True):
            path = acceptance.paths[i] = nodes[:length]
            acceptance.token_ids[i] = [token_ids[first_nodes[i] + node] for node in path]
            if final_token >= 0:
                acceptance.token_ids[i].append(final_token)
            else:
                last_row = int(start_loc[i]) + (1 + path[-1] if path else 0)
                acceptance.errors[i] = launched.errors.get(last_row) or explain_row(
                    plan.requests[i], launched.logits[last_row], launched.transformed[last_row]
                )
        if verified.matches is not None:
            for i, (greedy, sampled) in zip(rows, fetched[2].tolist(), strict=True):
                if not isnan(greedy):
                    acceptance.matches[i] = greedy, sampled
    logprobs = emitted_logprobs(plan.requests, start_loc, acceptance.paths, acceptance.token_ids, launched.logits, backend.upload)
    acceptance.logprobs.update(logprobs)
    return acceptance
