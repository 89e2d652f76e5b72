"""The requests' sampling options, spread over the rows of logits that one verification looks at."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from titan.logits import TransformedRows
from titan.request import Request
from titan.sampling import SamplingRows, spread_options
from titan.tree import DraftTree


def sampling_rows(requests: list[Request], trees: list[DraftTree], start_loc: NDArray[np.int64]) -> SamplingRows:
    """Spread the requests' options over the logits rows: root, then nodes, each with the position of its next token."""
    counts = start_loc[1:] - start_loc[:-1]
    transforms, forbidden = [], []
    for request, tree, first, count in zip(requests, trees, start_loc.tolist(), counts.tolist(), strict=False):
        if count and request.params.has_transforms:
            paths = _paths(tree, first)
            transforms.append(TransformedRows(request.params, request.prompt_token_ids, request.output_token_ids, paths))
        if count and request.num_output_tokens < request.params.min_tokens and request.stop_token_ids:
            is_early = request.num_output_tokens + tree.topology.row_depths < request.params.min_tokens
            stop_ids = sorted(request.stop_token_ids)
            forbidden += [(first + row, stop_ids) for row in np.flatnonzero(is_early).tolist()]
    depths = np.concatenate([tree.topology.row_depths[:count] for tree, count in zip(trees, counts, strict=True)])
    return spread_options(requests, counts, depths, forbidden, transforms)


def _paths(tree: DraftTree, first_row: int) -> dict[int, list[int]]:
    """The draft tokens from the root down to each row's node, by row; the root's row is ``first_row``."""
    paths: dict[int, list[int]] = {first_row: []}
    for node, (token_id, parent) in enumerate(zip(tree.token_ids.tolist(), tree.parents.tolist(), strict=True)):
        paths[first_row + 1 + node] = [*paths[first_row + 1 + parent], token_id]
    return paths
