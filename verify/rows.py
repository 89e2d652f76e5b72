"""The requests' sampling options, spread over the rows of logits that one verification looks at."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from titan.core.request import Request
from titan.core.trees import DraftTree
from titan.sample.distributions import SamplingRows, spread_options
from titan.sample.logits import TransformedRows

Ints = NDArray[np.int64]


class PrefixOptions(NamedTuple):
    """Options that look at the drafted prefix of each row, or at its length; see `SamplingRows`."""

    forbidden: list[tuple[int, list[int]]]
    transforms: list[TransformedRows]


def sampling_rows(requests: list[Request], trees: list[DraftTree], start_loc: Ints) -> SamplingRows:
    """Spread the requests' options over the logits rows: root, then nodes, each with the position of its next token."""
    counts = start_loc[1:] - start_loc[:-1]
    depths = np.concatenate([tree.topology.row_depths[:count] for tree, count in zip(trees, counts, strict=True)])
    return spread_options(requests, counts, depths, *prefix_options(requests, trees, start_loc))


def looks_at_prefix(request: Request) -> bool:
    """Whether the options of a request look at drafted prefixes, now."""
    return request.params.has_transforms or _holds_stops_back(request)


def prefix_options(requests: list[Request], trees: list[DraftTree], start_loc: Ints) -> PrefixOptions:
    """What the requests' options make of the trees' prefixes; logits rows beyond a tree's nodes are left out."""
    counts = start_loc[1:] - start_loc[:-1]
    transforms, forbidden = [], []
    for request, tree, first, count in zip(requests, trees, start_loc.tolist(), counts.tolist(), strict=False):
        if count and request.params.has_transforms:
            paths = _paths(tree, first)
            transforms.append(TransformedRows(request.params, request.prompt_token_ids, request.output_token_ids, paths))
        if count and _holds_stops_back(request):
            is_early = request.num_output_tokens + tree.topology.row_depths < request.params.min_tokens
            stop_ids = sorted(request.stop_token_ids)
            forbidden += [(first + row, stop_ids) for row in np.flatnonzero(is_early).tolist()]
    return PrefixOptions(forbidden, transforms)


def _holds_stops_back(request: Request) -> bool:
    return request.num_output_tokens < request.params.min_tokens and bool(request.stop_token_ids)


def _paths(tree: DraftTree, first_row: int) -> dict[int, list[int]]:
    """The draft tokens from the root down to each row's node, by row; the root's row is ``first_row``."""
    paths: dict[int, list[int]] = {first_row: []}
    for node, (token_id, parent) in enumerate(zip(tree.token_ids.tolist(), tree.parents.tolist(), strict=True)):
        paths[first_row + 1 + node] = [*paths[first_row + 1 + parent], token_id]
    return paths
