"""Log-probabilities of the tokens that a step emits, for the requests that ask for them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from titan.core.arrays import Ints
from titan.core.outputs import Logprob
from titan.core.request import Request
from titan.core.trees import Upload


def emitted_logprobs(
    requests: list[Request],
    start_loc: Ints,
    paths: list[list[int]],
    token_ids: list[list[int]],
    logits: Tensor,
    upload: Upload,
) -> dict[int, list[dict[int, Logprob]]]:
    """Compute the model's own log-probabilities, from the logits before any transform, temperature or filter.

    Makes one copy to the device and one back.

    Args:
        requests: R of them.
        start_loc: [R + 1], first row of each request in ``logits``: its root, then its nodes.
        paths: accepted nodes of each request.
        token_ids: what each request emits: the tokens of its path, then the final token, if it has one.
        logits: [L, vocab].
        upload: uploads arrays to the device of the logits.

    Returns:
        By index of each request that asks for them, an entry per emitted token: by id, the token, then the most likely ones.
    """
    asking = [i for i, request in enumerate(requests) if request.params.logprobs is not None and token_ids[i]]
    if not asking:
        return {}
    emitted = [(i, node, token_id) for i in asking for node, token_id in zip([-1, *paths[i]], token_ids[i], strict=False)]
    rows = np.array([start_loc[i] + 1 + node for i, node, _ in emitted], np.int64)
    tokens = np.array([[token_id] for *_, token_id in emitted], np.int64)
    row_index, token_index = upload([rows, tokens])
    logprobs = logits.index_select(0, row_index).float().log_softmax(-1)
    own = logprobs.gather(1, token_index)
    ranks = (logprobs > own).sum(-1, keepdim=True) + 1
    num_best = min(max(requests[i].params.logprobs or 0 for i in asking), logprobs.shape[-1])
    best = logprobs.topk(num_best, dim=-1)
    # float64 holds ids, ranks and float32 numbers exactly
    table = torch.cat([each.double() for each in (own, ranks, best.values, best.indices)], 1).tolist()

    result: dict[int, list[dict[int, Logprob]]] = {i: [] for i in asking}
    for (i, _, token_id), (logprob, rank, *both) in zip(emitted, table, strict=True):
        best_logprobs, best_ids = both[:num_best], map(int, both[num_best:])
        pairs = list(zip(best_ids, best_logprobs, strict=True))[: requests[i].params.logprobs]
        entries = {best_id: Logprob(best_logprob, k) for k, (best_id, best_logprob) in enumerate(pairs, start=1)}
        result[i].append({token_id: Logprob(logprob, int(rank))} | entries)
    return result
