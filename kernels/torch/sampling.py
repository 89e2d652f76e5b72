"""The largest logits, softmax at a temperature, draws and rejection: the parts of sampling that look at the whole vocabulary."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from itertools import accumulate
from math import nan
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from titan.kernels.cpu.library import COMPILED_DTYPES, kernel, usable_library

Ints = NDArray[np.int64] | NDArray[np.uint64]

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64

TINY_TEMPERATURE = 1e-3
"""Above it, no logit that a model makes overflows when it is divided."""


class LazyProbs(NamedTuple):
    """Distributions over the vocabulary, one per row, whose softmax may be still to come."""

    values: Tensor  # [n, vocab], logits; without temperatures probabilities, float32
    temperatures: Tensor | None  # float32 [n], above 0

    def probs(self) -> Tensor:
        """The probabilities: float32 [n, vocab], normalised; NaN in a row whose largest logit is not finite."""
        return self.values if self.temperatures is None else softmax_at(self.values, self.temperatures)

    def contiguous(self) -> LazyProbs:
        """The same, one number after the other in memory."""
        return LazyProbs(self.values.contiguous(), None if self.temperatures is None else self.temperatures.contiguous())


def argmax_rows(logits: Tensor) -> Tensor:
    """The first of the most likely tokens of each row.

    Args:
        logits: [n, vocab], any float dtype.

    Returns:
        int64 [n]; -1 where the largest logit is not finite.
    """
    if (library := _library_for(logits)) is not None:
        logits = logits.contiguous()
        tokens = torch.empty(logits.shape[0], dtype=torch.int64)
        _call(kernel(library, "argmax", logits.dtype), logits, tokens, *logits.shape)
        return tokens
    best, tokens = logits.max(-1)  # on a CPU five times as fast as argmax in bfloat16
    return tokens.masked_fill(~torch.isfinite(best), -1)


def best_children(logits: Tensor, count: int, temperatures: Tensor) -> tuple[Tensor, Tensor]:
    """The most likely tokens of each row with their log-probabilities: int64 and float32, [n, count] each.

    Args:
        logits: [n, vocab], any float dtype.
        count: where the vocabulary has fewer tokens, the rest has log-probability -inf.
        temperatures: float32 [n], above 0, at which the probabilities are meant.

    Returns:
        Tokens, the most likely first, and log-probabilities, which are not finite in a row whose largest logit is not.
    """
    if (library := _library_for(logits)) is not None:
        logits, temperatures = logits.contiguous(), temperatures.float().contiguous()
        tokens = torch.empty((logits.shape[0], count), dtype=torch.int64)
        logprobs = torch.empty((logits.shape[0], count), dtype=torch.float32)
        _call(kernel(library, "best_children", logits.dtype), logits, temperatures, tokens, logprobs, *logits.shape, count)
        return tokens, logprobs
    best = logits.topk(min(count, logits.shape[1]), dim=-1)
    largest, column = best.values[:, :1].float(), temperatures[:, None]
    log_total = ((logits.float() - largest) / column).logsumexp(-1, keepdim=True)
    padding = (0, count - best.values.shape[1])
    return pad(best.indices, padding), pad((best.values.float() - largest) / column - log_total, padding, value=float("-inf"))


def softmax_at(logits: Tensor, temperatures: Tensor) -> Tensor:
    """The softmax of logits divided by a temperature per row.

    Args:
        logits: [n, vocab], float32, bfloat16 or float16; not changed.
        temperatures: float32 [n], above 0.

    Returns:
        float32 [n, vocab]; NaN in a row whose largest logit is not finite.
    """
    if (library := _library_for(logits)) is not None:
        logits, temperatures = logits.contiguous(), temperatures.float().contiguous()
        probs = torch.empty(logits.shape, dtype=torch.float32)
        _call(kernel(library, "softmax", logits.dtype), logits, temperatures, probs, *logits.shape)
        return probs
    scaled = logits.to(torch.float32, copy=True)
    if (temperatures < TINY_TEMPERATURE).any():
        scaled -= scaled.amax(-1, keepdim=True)  # lest the division leads to infinity minus infinity
    return scaled.div_(temperatures[:, None]).softmax(-1)


def draw(probs: Tensor, uniform: Tensor) -> Tensor:
    """Inverse-CDF draw: one token per row.

    Args:
        probs: float32 [n, vocab], not necessarily normalised, at least one entry > 0 per row.
        uniform: float64 [n] in (0, 1).

    Returns:
        int64 [n]; a token of probability 0 never comes out.
    """
    cdf = probs.double().cumsum(-1)
    total = cdf[:, -1]
    # below the total whatever rounding does, so that the CDF steps over it, which it does at a possible token only
    height = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cdf, height[:, None], right=True)[:, 0]


def draw_siblings(probs: Tensor, uniform: Tensor, num_children: Tensor) -> Tensor:
    """Draws without replacement: int64 [n, K], -1 where no token is left and past a row's children.

    Args:
        probs: float32 [n, vocab], not necessarily normalised.
        uniform: float64 [n, K] in (0, 1), one per draw.
        num_children: int64 [n], draws of each row, at most K.
    """
    columns = []
    left = probs
    for rank in range(uniform.shape[1]):
        drawn = draw(left, uniform[:, rank]).clamp(max=left.shape[1] - 1)  # where nothing is left
        is_possible = (left.gather(1, drawn[:, None])[:, 0] > 0) & (num_children > rank)
        columns.append(torch.where(is_possible, drawn, -1))
        if rank + 1 < uniform.shape[1]:
            left = left.scatter(1, drawn[:, None], 0.0)
    return torch.stack(columns, 1)


def draw_compiled(rows: LazyProbs, seeds: Ints, positions: Ints, purpose: int) -> Tensor | None:
    """One draw per row by the compiled library, -1 where no token is possible: int64 [n]; ``None`` where there is no library.

    Args:
        rows: n of them.
        seeds: uint64 [n].
        positions: int64 [n].
        purpose: of the random numbers, see `titan.sample.distributions.philox_uniform`.
    """
    values, temperatures = rows.contiguous()
    if (library := _library_for(values)) is None:
        return None
    tokens = torch.empty(len(values), dtype=torch.int64)
    keys = torch.from_numpy(seeds), torch.from_numpy(positions)
    _call(kernel(library, "draw_tokens", values.dtype), values, temperatures, *keys, purpose, tokens, *values.shape)
    return tokens


def draw_children_compiled(
    rows: LazyProbs,
    seeds: Ints,
    positions: Ints,
    purpose: int,
    num_children: Ints,
    places: Tensor,
    probs: Tensor,
    tokens: Tensor,
) -> bool:
    """`draw_siblings` by the compiled library, which makes the random numbers, and writes the probabilities down too.

    Args:
        rows: n of them.
        seeds: uint64 [n].
        positions: int64 [n].
        purpose: of the random numbers, see `titan.sample.distributions.philox_uniform`; rank k is sibling k.
        num_children: int64 [n], draws of each row, at most K.
        places: int64 [n], the row of the two tables below that each row is written to.
        probs: float32 [any, vocab], overwritten at ``places``.
        tokens: int64 [any, K], overwritten at ``places``, of each row as many as it has draws.

    Returns:
        Whether there is a library; if not, nothing has happened.
    """
    values, temperatures = rows.contiguous()
    if (library := _library_for(values)) is None:
        return False
    keys = torch.from_numpy(seeds), torch.from_numpy(positions)
    tensors = (torch.from_numpy(num_children), places, probs, tokens)
    function = kernel(library, "draw_children", values.dtype)
    _call(function, values, temperatures, *keys, purpose, *tensors, *values.shape, tokens.shape[1])
    return True


class WalkedTree(NamedTuple):
    """A draft tree that is to be verified, and how its request samples."""

    token_ids: NDArray[np.int64]  # [num_nodes]
    parents: NDArray[np.int32]  # [num_nodes]; -1 for the root, which is no node; a parent comes before its children
    draft_probs: Tensor | None  # float32 [inner nodes, vocab], contiguous, q; None for tokens that were not drawn
    inner_rows: NDArray[np.int64]  # [1 + num_nodes], which row of q belongs to the root and to each node; -1 for a leaf
    temperature: float  # 0: the most likely tokens
    seed: int
    position: int  # of the token that follows the root


class WalkEnd(NamedTuple):
    """Where the path of a tree ends."""

    row: int  # of all rows
    token: int  # that follows there; -1 where none can be drawn
    matches: tuple[float, float]  # at the root p of q's most likely token and sum(min(p, q)); NaN for tokens that were not drawn


class _TreesStruct(ctypes.Structure):
    """``VerifiedTrees`` of the source."""

    _fields_ = [
        *((name, _POINTER) for name in ("node_start_loc", "temperatures", "seeds", "positions", "draft_probs")),
        *((name, ctypes.c_char_p) for name in ("token_ids", "parents", "inner_rows")),
    ]


def verify_compiled(values: Tensor, trees: Sequence[WalkedTree], *, is_logits: bool) -> list[WalkEnd] | None:
    """Verify trees by the compiled library, which looks at the rows on their paths alone; ``None`` where there is none.

    Trees whose tokens were drawn are verified by recursive rejection over siblings, the others by sample-and-match.

    Args:
        values: [L, vocab], of each tree the row of its root, then those of its nodes: logits, or float32 probabilities.
        trees: one or more.
        is_logits: which of them; temperatures are those of logits.
    """
    if (library := _library_for(values)) is None:
        return None
    values = values.contiguous()
    columns = (
        array("q", accumulate([len(tree.token_ids) for tree in trees], initial=0)),
        array("f", [tree.temperature for tree in trees]),
        array("Q", [tree.seed for tree in trees]),
        array("q", [tree.position for tree in trees]),
        array("Q", [0 if tree.draft_probs is None else tree.draft_probs.data_ptr() for tree in trees]),
    )
    struct = _TreesStruct(
        *[column.buffer_info()[0] for column in columns],
        b"".join([tree.token_ids.tobytes() for tree in trees]),
        b"".join([tree.parents.tobytes() for tree in trees]),
        b"".join([tree.inner_rows.tobytes() for tree in trees]),
    )
    if not is_logits:
        struct.temperatures = None
    num_trees = len(trees)
    rows, tokens, matches = array("q", bytes(8 * num_trees)), array("q", bytes(8 * num_trees)), array("f", [nan] * (2 * num_trees))
    function = kernel(library, "verify_trees", values.dtype)
    results = [_POINTER(each.buffer_info()[0]) for each in (rows, tokens, matches)]
    function(_POINTER(values.data_ptr()), _INT(values.shape[1]), ctypes.byref(struct), *results, _INT(num_trees))
    return [WalkEnd(*each) for each in zip(rows, tokens, zip(matches[::2], matches[1::2], strict=True), strict=True)]


def _library_for(tensor: Tensor) -> ctypes.CDLL | None:
    """The library, if it can take the tensor."""
    return usable_library() if tensor.is_cpu and tensor.dtype in COMPILED_DTYPES else None


def _call(function: Any, *arguments: Tensor | int | None) -> None:
    """Call a function of the library with tensors, ``None`` for one that is not there, and numbers."""
    function.restype = None
    function(*map(_as_argument, arguments))


def _as_argument(value: Tensor | int | None) -> ctypes.c_void_p | ctypes.c_int64:
    if isinstance(value, int):
        return ctypes.c_int64(value)
    return ctypes.c_void_p(None if value is None else value.data_ptr())
