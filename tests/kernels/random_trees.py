"""Random draft trees for the acceptance kernels."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from titan.core.trees import DraftTree, chain_parents
from titan.kernels.triton.tools import INTERPRETED

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")


def random_parents(rng: np.random.Generator, num_nodes: int) -> NDArray[np.int32]:
    """A chain, a star, or anything between."""
    match rng.integers(4):
        case 0:
            return chain_parents(num_nodes)
        case 1:
            return np.full(num_nodes, -1, np.int32)
        case _:
            return np.array([rng.integers(-1, node) for node in range(num_nodes)], np.int32).reshape(num_nodes)


def packed(trees: list[DraftTree]) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids int64 [N], parents int32 [N] and start locations int32 [S + 1] of the trees' nodes."""
    start_loc = np.cumsum([0] + [tree.num_nodes for tree in trees]).astype(np.int32)
    token_ids = np.concatenate([tree.token_ids for tree in trees])
    parents = np.concatenate([tree.parents for tree in trees])
    return tuple(torch.from_numpy(array).to(DEVICE) for array in (token_ids, parents, start_loc))  # type: ignore[return-value]


def accepted(paths: Tensor, num_accepted: Tensor) -> list[list[int]]:
    """Accepted nodes of each request; what lies behind them in ``paths`` must be -1."""
    rows = [(path[:count], path[count:]) for path, count in zip(paths.tolist(), num_accepted.tolist(), strict=True)]
    assert all(set(rest) <= {-1} for _, rest in rows)
    return [path for path, _ in rows]
