"""Verification: decides which draft tokens are accepted, and which token follows them.

The rules are stated in `titan.kernels.torch.trees`; the back end applies them. One copy brings the results to the host, and waits
for the device. A verification needs more copies only if a request asks for logprobs, if it has nodes and options that look at
drafted prefixes (penalties, logit bias, processors, ``min_tokens``), or if nothing can be sampled from its logits.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from titan.core.batch import RaggedBatch
from titan.core.sampling_rows import SamplingRows
from titan.core.step import Acceptance, StepPlan
from titan.core.trees import DraftTrees
from titan.kernels.interfaces import Backend
from titan.verify.logprobs import emitted_logprobs, prompt_logprobs
from titan.verify.options import explain_row, looks_at_prefix, transform_rows


def accept(backend: Backend, plan: StepPlan, trees: DraftTrees, batch: RaggedBatch, logits: Tensor) -> Acceptance:
    """Choose the accepted path and the final token of every request of a step, and compute the logprobs that requests ask for.

    Args:
        backend: the one that computed the logits.
        plan: of the step.
        trees: one per row of the plan.
        batch: of the target's pass.
        logits: [L, vocab], of the batch's rows: for each request its root, then its nodes; and those for the logprobs of prompts.
    """
    requests, start_loc = plan.requests, batch.logits_start_loc
    prompt_entries = {}
    if batch.prompt_logits is not None:
        prompt_entries = prompt_logprobs(plan, logits, batch.prompt_logits, backend.upload)
        [others] = backend.upload([np.delete(np.arange(len(logits)), batch.prompt_logits)])
        logits = logits.index_select(0, others)
    reached = plan.emitting_rows()
    paths: list[list[int]] = [[] for _ in requests]
    token_ids: list[list[int]] = [[] for _ in requests]
    errors: list[str | None] = [None] * len(requests)
    if not reached:  # a step of prefill chunks
        return Acceptance(trees.without_nodes(), paths, token_ids, errors, prompt_logprobs=prompt_entries)
    host_trees: DraftTrees | None = None
    used = logits  # after transforms
    of_processors = dict[int, str]()  # errors by row of the logits
    looking = [i for i in reached if looks_at_prefix(requests[i])]
    if looking:
        host_trees = trees.on_host(backend.download(trees.nodes)) if trees.counts[looking].any() else None
        used, of_processors = transform_rows(logits, requests, host_trees, start_loc, backend.upload)
    sampling = SamplingRows.of([(requests[i].params, requests[i].seed, requests[i].num_tokens) for i in reached])
    verified = backend.trees.verify(used, trees, np.array(reached), sampling)

    if host_trees is None and not trees.num_nodes:
        host_trees = trees.without_nodes()
    fetched = backend.download([*verified, *(trees.nodes if host_trees is None else ())])
    host_trees = host_trees or trees.on_host(fetched[2:])
    drafted, first_nodes = host_trees.nodes.token_ids.tolist(), host_trees.start_loc.tolist()
    for i, nodes, final_token in zip(reached, fetched[0].tolist(), fetched[1].tolist(), strict=True):
        path = paths[i] = [node for node in nodes if node >= 0]
        token_ids[i] = [drafted[first_nodes[i] + node] for node in path]
        if final_token >= 0:
            token_ids[i].append(final_token)
        elif path:
            path.pop()  # its last token becomes the final one, so that the next step says why none may follow
        else:
            root = int(start_loc[i])
            errors[i] = of_processors.get(root) or explain_row(requests[i], logits[root], used[root])
    logprobs = emitted_logprobs(requests, start_loc, paths, token_ids, logits, backend.upload)
    return Acceptance(host_trees, paths, token_ids, errors, logprobs, prompt_entries)
