"""Log-probabilities of the tokens that a step emits, and of prompts, for the requests that ask for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from titan.core.arrays import Ints
from titan.core.outputs import Logprob
from titan.core.request import Request
from titan.core.sampling_params import MAX_LOGPROBS
from titan.core.step import StepPlan
from titan.core.trees import Upload

MAX_ROWS = 256
"""Most rows whose log-probabilities are computed at once: a prompt may have many."""


def emitted_logprobs(
    requests: list[Request],
    start_loc: Ints,
    paths: list[list[int]],
    token_ids: list[list[int]],
    logits: Tensor,
    upload: Upload,
) -> dict[int, list[dict[int, Logprob]]]:
    """Compute the model's own log-probabilities, from the logits before any transform, temperature or filter.

    Args:
        requests: R of them.
        start_loc: int64 [R + 1], first row of each request in ``logits``: its root, then its nodes.
        paths: accepted nodes of each request.
        token_ids: emitted tokens of each request: those of its path, then the final token, if it has one.
        logits: [L, vocab].
        upload: uploads arrays to the device of the logits.

    Returns:
        By index of each request that asks for them, one entry per emitted token. An entry maps ids to log-probabilities: first that
        of the emitted token, then those of the most likely ones.
    """
    asking = [i for i, request in enumerate(requests) if request.params.logprobs is not None and token_ids[i]]
    if not asking:
        return {}
    emitted = [(i, node, token_id) for i in asking for node, token_id in zip([-1, *paths[i]], token_ids[i], strict=False)]
    rows = [int(start_loc[i]) + 1 + node for i, node, _ in emitted]
    counts = [requests[i].params.logprobs or 0 for i, *_ in emitted]
    result: dict[int, list[dict[int, Logprob]]] = {i: [] for i in asking}
    for (i, *_), entry in zip(emitted, _entries(logits, rows, [each for *_, each in emitted], counts, upload), strict=True):
        result[i].append(entry)
    return result


def prompt_logprobs(plan: StepPlan, logits: Tensor, rows: Ints, upload: Upload) -> dict[int, list[dict[int, Logprob]]]:
    """Compute the model's own log-probabilities of prompt tokens.

    Args:
        plan: of the step; the counters of its requests have not advanced yet.
        logits: [L, vocab].
        rows: those of them that `Request.prompt_logits` names, request by request.
        upload: uploads arrays to the device of the logits.

    Returns:
        By row of the plan, an entry as in `emitted_logprobs` for the prompt token after each of these positions.
    """
    asked = [
        (i, request.prompt_token_ids[position + 1], request.params.prompt_logprobs or 0)
        for i, (request, num_tokens) in enumerate(zip(plan.requests, plan.num_tokens, strict=True))
        for position in request.prompt_logits(num_tokens)
    ]
    owners, token_ids, counts = zip(*asked, strict=True)
    result: dict[int, list[dict[int, Logprob]]] = {i: [] for i in owners}
    for i, entry in zip(owners, _entries(logits, rows.tolist(), token_ids, counts, upload), strict=True):
        result[i].append(entry)
    return result


def _entries(
    logits: Tensor, rows: Sequence[int], token_ids: Sequence[int], counts: Sequence[int], upload: Upload
) -> Iterator[dict[int, Logprob]]:
    """Yield an entry for each row: its token, then as many of the most likely tokens as its count says; -1 = all.

    Makes one copy to the device and one back per part of at most `MAX_ROWS` rows. Rows with all tokens get parts of their own, and
    every other row fetches `MAX_LOGPROBS`: which of tied tokens `topk` lists first depends on how many are asked for.
    """
    vocab_size = logits.shape[-1]
    for _, run in groupby(range(len(rows)), lambda i: (i // MAX_ROWS, counts[i] < 0)):
        index = [*run]
        part = slice(index[0], index[-1] + 1)
        most = vocab_size if counts[index[0]] < 0 else min(MAX_LOGPROBS, vocab_size)
        row_index, token_index = upload([np.array(rows[part], np.int64), np.array(token_ids[part], np.int64)[:, None]])
        logprobs = logits.index_select(0, row_index).float().log_softmax(-1)
        own = logprobs.gather(1, token_index)
        ranks = (logprobs > own).sum(-1, keepdim=True) + 1
        best = logprobs.topk(most, dim=-1)
        # float64 holds ids, ranks and float32 numbers exactly
        table = torch.cat([each.double() for each in (own, ranks, best.values, best.indices)], 1).tolist()
        for token_id, count, (logprob, rank, *both) in zip(token_ids[part], counts[part], table, strict=True):
            shown = min(count, most) if count >= 0 else most
            pairs = zip(both[most:][:shown], both[:shown], strict=True)
            entries = {int(best_id): Logprob(best_logprob, k) for k, (best_id, best_logprob) in enumerate(pairs, start=1)}
            yield {token_id: Logprob(logprob, int(rank))} | entries
