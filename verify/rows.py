"""The requests' sampling options, spread over the rows of logits that one verification looks at."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from titan.logits import TransformedRows
from titan.request import Request
from titan.sampling import SamplingRows
from titan.tree import DraftTree


def sampling_rows(requests: list[Request], trees: list[DraftTree], start_loc: NDArray[np.int64]) -> SamplingRows:
    """Spread the requests' options over the logits rows: root, then nodes, each with the position of its next token."""
    if all(request.takes_argmax for request in requests):
        return _greedy_rows(int(start_loc[-1]))
    counts = np.diff(start_loc)
    params = [request.params for request in requests]

    def spread(values: list[float], dtype: type[np.generic]) -> NDArray[np.generic]:
        return np.repeat(np.asarray(values, dtype), counts)

    positions = np.empty(int(start_loc[-1]), np.int64)
    forbidden = []
    transforms = []
    for i, (request, tree) in enumerate(zip(requests, trees, strict=True)):
        first, last = int(start_loc[i]), int(start_loc[i + 1])
        if first == last:
            continue
        positions[first] = request.num_tokens
        positions[first + 1 : last] = request.num_tokens + tree.depths
        if params[i].has_transforms:
            paths = _paths(tree, first)
            transforms.append(TransformedRows(params[i], request.prompt_token_ids, request.output_token_ids, paths))
        if request.num_output_tokens < request.params.min_tokens and request.stop_token_ids:
            is_early = positions[first:last] - request.num_prompt_tokens < request.params.min_tokens
            stop_ids = sorted(request.stop_token_ids)
            forbidden += [(first + row, stop_ids) for row in np.flatnonzero(is_early).tolist()]
    return SamplingRows(
        temperature=spread([p.temperature for p in params], np.float32),  # type: ignore[arg-type]
        top_k=spread([p.top_k for p in params], np.int64),  # type: ignore[arg-type]
        top_p=spread([p.top_p for p in params], np.float32),  # type: ignore[arg-type]
        min_p=spread([p.min_p for p in params], np.float32),  # type: ignore[arg-type]
        seeds=np.repeat(np.asarray([request.seed for request in requests], np.uint64), counts),
        positions=positions,
        forbidden=forbidden,
        transforms=transforms,
    )


def _paths(tree: DraftTree, first_row: int) -> dict[int, list[int]]:
    """The draft tokens from the root down to each row's node, by row; the root's row is ``first_row``."""
    paths: dict[int, list[int]] = {first_row: []}
    for node, (token_id, parent) in enumerate(zip(tree.token_ids.tolist(), tree.parents.tolist(), strict=True)):
        paths[first_row + 1 + node] = [*paths[first_row + 1 + parent], token_id]
    return paths


def _greedy_rows(num_rows: int) -> SamplingRows:
    zeros = np.zeros(num_rows, np.float32)
    integers = np.zeros(num_rows, np.int64)
    return SamplingRows(zeros, integers, zeros, zeros, integers.astype(np.uint64), integers, ())
