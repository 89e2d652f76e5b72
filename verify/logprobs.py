"""Log-probabilities of the tokens that a step emits, for the requests that ask for them."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from titan.outputs import Logprob
from titan.request import Request


def emitted_logprobs(
    requests: list[Request],
    start_loc: NDArray[np.int64],
    paths: list[list[int]],
    token_ids: list[list[int]],
    logits: Tensor,
) -> dict[int, list[dict[int, Logprob]]]:
    """The model's own log-probabilities: of the logits before any transform, temperature or filter.

    Args:
        requests: R of them.
        start_loc: [R + 1], first row of each request in ``logits``: its root, then its nodes.
        paths: accepted nodes of each request.
        token_ids: what each request emits, the tokens of its path and then, mostly, the final one.
        logits: [L, vocab].

    Returns:
        By the index of each request that asks, for each of its emitted tokens: the token, then the most likely ones, by id.
    """
    asking = [i for i, request in enumerate(requests) if request.params.logprobs is not None and token_ids[i]]
    if not asking:
        return {}
    emitted = [(i, node, token_id) for i in asking for node, token_id in zip([-1, *paths[i]], token_ids[i], strict=False)]
    rows = torch.tensor([start_loc[i] + 1 + node for i, node, _ in emitted])
    logprobs = logits[rows.to(logits.device)].float().log_softmax(-1)
    own = logprobs.gather(1, torch.tensor([[token_id] for *_, token_id in emitted], device=logits.device))
    ranks = (logprobs > own).sum(-1) + 1
    best = logprobs.topk(min(max(requests[i].params.logprobs or 0 for i in asking), logprobs.shape[-1]), dim=-1)

    result: dict[int, list[dict[int, Logprob]]] = {i: [] for i in asking}
    columns = (own[:, 0].tolist(), ranks.tolist(), best.indices.tolist(), best.values.tolist())
    for (i, _, token_id), logprob, rank, best_ids, best_logprobs in zip(emitted, *columns, strict=True):
        pairs = list(zip(best_ids, best_logprobs, strict=True))[: requests[i].params.logprobs]
        entries = {best_id: Logprob(best_logprob, k) for k, (best_id, best_logprob) in enumerate(pairs, start=1)}
        result[i].append({token_id: Logprob(logprob, rank)} | entries)
    return result
