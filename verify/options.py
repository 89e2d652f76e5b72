"""Applies the options of requests that change logits by the drafted prefix of a row, or by its length."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from math import isfinite

import numpy as np
from torch import Tensor

from titan.core.arrays import Ints
from titan.core.request import Request
from titan.core.trees import EMPTY_TREE, DraftTree, DraftTrees, Upload
from titan.verify.transforms import TransformedRows, TransformResult, transform_logits

NO_TOKENS = np.zeros(0, np.int64)
"""In place of the distinct tokens of a prompt where they are not needed."""


def looks_at_prefix(request: Request) -> bool:
    """Whether the options of a request look at drafted prefixes in this step."""
    return request.has_transforms or _holds_stops_back(request)


def transform_rows(
    logits: Tensor, requests: Sequence[Request], trees: DraftTrees | None, start_loc: Ints, upload: Upload
) -> TransformResult:
    """Apply the transforms of a step's requests to its logits.

    Args:
        logits: [L, vocab]; not changed.
        requests: of all rows of the plan.
        trees: of the same rows, on the host; ``None``: no request whose options look at prefixes has nodes.
        start_loc: int64 [rows of the plan + 1], prefix sums of logits rows per request; rows of empty places stay as they are.
        upload: uploads arrays to the device of the logits.
    """
    transforms: list[TransformedRows] = []
    forbidden: dict[int, set[int]] = defaultdict(set)
    for i, (request, first, end) in enumerate(zip(requests, start_loc.tolist(), start_loc[1:].tolist(), strict=False)):
        if first == end or not looks_at_prefix(request):
            continue
        tree = EMPTY_TREE if trees is None else trees[i]
        if request.has_transforms:
            paths, output = _paths(tree, first), request.token_array[request.num_prompt_tokens :]
            distinct = request.distinct_prompt_ids if request.params.repetition_penalty != 1.0 else NO_TOKENS
            transforms.append(TransformedRows(request.params, request.token_ids, output, distinct, paths))
            longest = max(map(len, request.bad_word_ids), default=0)
            for row, path in paths.items() if longest else ():
                forbidden[row].update(_last_of_bad_words([*output[-longest:].tolist(), *path], request.bad_word_ids))
        if _holds_stops_back(request):
            is_early = request.num_output_tokens + np.append(0, tree.topology.depths) < request.params.min_tokens
            for row in np.flatnonzero(is_early).tolist():
                forbidden[first + row] |= request.stop_token_ids
    return transform_logits(logits, transforms, forbidden, upload)


def explain_row(request: Request, logits: Tensor, transformed: Tensor) -> str:
    """Return the reason why nothing can be sampled from a row of logits; waits for the device.

    Args:
        request: of the row.
        logits: [vocab], as the model computed them.
        transformed: [vocab], as `transform_rows` left them.
    """
    largest = float(transformed.max())
    if not logits.max().isfinite() or isfinite(largest):
        return "the target's logits are not finite"
    params = request.params
    options = [
        *(name for name in ("logits_processors", "allowed_token_ids", "bad_words") if getattr(params, name)),
        *([f"min_tokens={params.min_tokens} with {len(request.stop_token_ids)} stop tokens"] if _holds_stops_back(request) else []),
        *([f"repetition_penalty={params.repetition_penalty}"] if params.repetition_penalty != 1.0 else []),
    ]
    names = " and ".join(options)
    return f"{names}: no token can be sampled, for the largest logit becomes {largest}; allowed is what keeps it finite"


def _holds_stops_back(request: Request) -> bool:
    return request.num_output_tokens < request.params.min_tokens and bool(request.stop_token_ids)


def _last_of_bad_words(output: list[int], words: Iterable[tuple[int, ...]]) -> Iterator[int]:
    """Return the tokens that would complete a bad word; ``output`` must reach back as far as the longest word does."""
    return (word[-1] for word in words if len(word) <= len(output) + 1 and output[len(output) + 1 - len(word) :] == [*word[:-1]])


def _paths(tree: DraftTree, first_row: int) -> dict[int, list[int]]:
    """Return the draft tokens from the root down to each row's node, by row; the root's row is ``first_row``."""
    paths: dict[int, list[int]] = {first_row: []}
    for node, (token_id, parent) in enumerate(zip(tree.token_ids.tolist(), tree.parents.tolist(), strict=True)):
        paths[first_row + 1 + node] = [*paths[first_row + 1 + parent], token_id]
    return paths
