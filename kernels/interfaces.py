"""What a back end is: the protocols that it fills. Nothing here runs.

A back end belongs to one device and is chosen once, by `titan.kernels.backend.choose_backend`. The parts of the engine get it
handed in and ask it for what they need; which device or library it is, none of them asks. A new back end is one folder.

Legend: T query tokens, H query heads, K KV heads of dimension D; L rows of logits; S trees that are verified.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor

from titan.core.arrays import Flags, Ints
from titan.core.batch import RaggedBatch, Window
from titan.core.growth import Feed
from titan.core.kv_tensor import KVTensor
from titan.core.sampling_rows import SamplingRows
from titan.core.trees import DraftTrees


class TokenPlaces(NamedTuple):
    """Where the tokens of a pass are in their sequences and in the cache."""

    rope_table: Tensor  # [max_positions, 2, D], see `titan.models.rope.rope_table`
    positions: Tensor  # int64 [T], below max_positions
    slots: Tensor  # int64 [T], distinct


class LayerOps(Protocol):
    """The operations of a decoder layer."""

    name: str
    packs: bool  # whether `pack` makes copies in a layout of its own

    def pack(self, weight: Tensor) -> Tensor:
        """A weight [out_features, in_features] in the layout that `linear` reads fastest; the weight itself where it has it."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """``x @ weight.T + bias`` with a packed or a plain weight: [rows, in_features] -> [rows, out_features]."""

    def plan_attention(self, layout: Any, windows: Sequence[Window]) -> Any:
        """Prepare `tree_attention` for a pass, once for all layers.

        Args:
            layout: what the runner of the same back end gives a model as its attention layout.
            windows: the distinct ones of the layers.
        """

    def tree_attention(self, q: Tensor, kv_layer: Tensor, plan: Any, *, scale: float, window: Window) -> Tensor:
        """Attend from every query token to the slots that it sees.

        Args:
            q: [T, H, D], the last dimension contiguous.
            kv_layer: [2, K, num_blocks, block_size, D], keys and values; the tokens' own are written.
            plan: from `plan_attention`.
            scale: multiplies the scores.
            window: this layer's sliding window, one of those planned for.

        Returns:
            [T, H * D], dtype of ``q``.
        """

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """``x / sqrt(mean(x ** 2) + eps) * weight`` over the last dimension, in float32: [T, size] -> [T, size]."""

    def linear_add_norm(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, norm_weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """End one part of a layer and begin the next: a linear layer, its addition to the residual stream, and a norm.

        Args:
            x: [T, in_features].
            weight: [out_features, in_features], packed or plain.
            bias: [out_features].
            residual: [T, out_features]; may be overwritten.
            norm_weight: [out_features], of `rms_norm`.
            eps: of that norm.

        Returns:
            The residual stream ``residual + x @ weight.T + bias``, and its norm, [T, out_features] each.
        """

    def rope_and_write_kv(self, qkv: Tensor, places: TokenPlaces, kv_layer: Tensor, qk_norm: Tensor | None, eps: float) -> Tensor:
        """Rotate queries and keys by their positions, and write keys and values to their slots.

        Args:
            qkv: [T, (H + 2 * K) * D]; may be overwritten.
            places: of the tokens; where the runner of the same back end pads a pass, slot -1 writes nothing.
            kv_layer: [2, K, num_blocks, block_size, D], updated in place.
            qk_norm: [H + K, D], weights of an RMSNorm of each head before its rotation.
            eps: of that norm.

        Returns:
            The queries: [T, H, D].
        """

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """``silu(gate) * up``: [T, 2 * size] -> [T, size]."""


@dataclass(frozen=True, slots=True, eq=False)
class PassInputs:
    """What a model reads of the batch of one pass, made by the runner of a back end."""

    token_ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T], rope positions
    slot_mapping: Tensor  # int64 [T], where keys and values are written; -1 = nowhere
    logits_rows: Tensor | None  # int64 [L], rows of T whose logits are wanted; None: all
    attention: Any  # the layout that the `LayerOps` of the same back end plan attention from


class Model(Protocol):
    """A causal language model as runners see it; `titan.models.decoder.Decoder` is one."""

    config: Any
    dtype: torch.dtype

    def check_positions(self, positions: Ints) -> None:
        """Refuse positions that the model does not have."""

    def hidden_states(self, inputs: PassInputs, kv: KVTensor) -> Tensor:
        """All but the output head: [L, hidden_size]."""

    def logits(self, hidden: Tensor) -> Tensor:
        """The output head: [L, hidden_size] -> [L, vocab_size]."""


class Runner(Protocol):
    """A model with its KV."""

    def forward(self, batch: RaggedBatch) -> Tensor:
        """One pass over a ragged batch: logits [L, vocab] of the rows that need them."""

    def grow(self, feeds: Sequence[Feed], num_rows: int, vocab_size: int) -> DraftTrees:
        """Feed a draft model what it lacks, and grow draft trees by the specs.

        Args:
            feeds: one or more requests.
            num_rows: of the plan; those that no feed belongs to get an empty tree.
            vocab_size: of the target; draft tokens beyond it are not proposed.
        """


class PathMove(NamedTuple):
    """An accepted path whose KV goes to the first slots of its tree."""

    block_ids: list[int]  # of the request
    first_slot: int  # of the tree, in the request
    path: list[int]  # slots of the nodes, counted from there


class CacheOps(Protocol):
    """Paged KV beside what layers write; every operation is over all groups of layers, in place."""

    def move_paths(self, kv: KVTensor, moves: Sequence[PathMove]) -> None:
        """Move node ``path[j]`` of each request to slot ``first_slot + j``; all of a path is read before it is written."""

    def copy_blocks(self, kv: KVTensor, sources: Ints, targets: Ints) -> None:
        """Copy whole blocks, int64 [n] each; no target twice, and none is also a source."""

    def clear_blocks(self, kv: KVTensor, block_ids: Ints) -> None:
        """Zero blocks, int64 [n]: what a former owner left must not reach the new one."""


class SamplingOps(Protocol):
    """What looks at the whole vocabulary while a tree grows."""

    def argmax(self, logits: Tensor) -> Tensor:
        """The first of the most likely tokens of each row: [n, vocab] -> int64 [n]; -1 where the largest logit is not finite."""

    def top_candidates(self, logits: Tensor, count: int, temperatures: Tensor) -> tuple[Tensor, Tensor]:
        """The most likely tokens of each row with their log-probabilities: int64 and float32, [n, count] each.

        Args:
            logits: [n, vocab], any float dtype.
            count: where the vocabulary has fewer tokens, the rest has log-probability -inf.
            temperatures: float32 [n], above 0, at which the probabilities are meant.

        Returns:
            Tokens, the most likely first, and log-probabilities, which are not finite in a row whose largest logit is not.
        """

    def probs(self, logits: Tensor, rows: SamplingRows) -> Tensor:
        """The distributions that are sampled from: temperature, then top-k, top-p, min-p.

        Returns:
            float32 [n, vocab], normalised; what is cut is 0, and at temperature 0 all is on the most likely token. NaN in a row
            whose largest logit is not finite.
        """

    def sample_children(
        self, logits: Tensor, rows: SamplingRows, num_children: Ints, places: Tensor, probs: Tensor, children: Tensor
    ) -> None:
        """Sample the children of nodes without replacement.

        Args:
            logits: [n, vocab].
            rows: n of them, with the positions of the tokens to be sampled.
            num_children: int64 [n].
            places: int64 [n], rows of the two tables below that belong to the nodes.
            probs: float32 [I, vocab], overwritten at ``places`` with what was sampled from.
            children: int64 [I, most children], likewise, from the left; -1 where no token is left.
        """


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """Tokens that may become nodes, of n requests: [n, c] each, parents before their children, none above its parent's score."""

    rows: Ints  # [n], of the plan
    num_nodes: Ints  # [n], places of the trees, at most c
    is_chain: Flags  # [n]
    has_scores: bool
    token_ids: Tensor  # int64
    scores: Tensor  # float32, cumulative log-probability; not finite where there is no candidate
    parent_slots: Tensor  # int64, where the parent is fed; -1 for the root
    slots: Tensor  # int64, where the candidate itself is fed; -1 where it is not
    probs: Tensor | None = None  # float32 [I, vocab], what tokens were sampled from
    probs_rows: Ints | None = None  # [n, 1 + slots], which of them belong to the root, and to the node that is fed at each slot


class Verified(NamedTuple):
    """What each of S trees keeps, and the token that follows; tensors are on the device."""

    paths: Tensor  # int32 [S, any], accepted nodes from the root down, -1 after them
    final_tokens: Tensor  # int64 [S], recovered or bonus; -1 where it cannot be sampled
    # float32 [S, 2], at the roots of sampled trees: p of q's most likely token, and sum(min(p, q)); else NaN. None: all NaN
    matches: Tensor | None = None


class TreeOps(Protocol):
    """Choosing draft trees and verifying them; the rules are stated in `titan.kernels.torch.trees`."""

    def select(self, found: Sequence[Candidates], num_rows: int) -> DraftTrees:
        """Of each request's candidates the best ancestor-closed set: those with the greatest cumulative probability.

        Of equal ones the earlier are taken. The path of first children comes first, so that to accept it moves no KV.

        Args:
            found: of all requests that draft; tokens were sampled in one of them at most.
            num_rows: of the plan.
        """

    def verify(self, logits: Tensor, trees: DraftTrees, rows: Ints, sampling: SamplingRows) -> Verified:
        """Choose the accepted path and the final token of some trees.

        Args:
            logits: [L, vocab], of each tree the row of its root, then those of its nodes.
            trees: of a plan; those of other rows have no nodes.
            rows: int64 [S], of the plan, ascending.
            sampling: of the S requests, with the positions of the tokens that follow the roots.
        """


class PassLimits(NamedTuple):
    """Bounds of the small passes of an engine: decodes, verifications and drafting."""

    num_requests: int
    query_len: int  # of one request: the root and its draft tokens
    num_blocks: int  # of the tokens of one request


@dataclass(slots=True)
class PassCounts:
    """How the passes of a target and its draft ran."""

    num_replayed: int = 0
    num_eager: int = 0

    @property
    def hit_rate(self) -> float | None:
        """Share of those replayed; ``None`` if nothing was counted."""
        num_passes = self.num_replayed + self.num_eager
        return self.num_replayed / num_passes if num_passes else None


class Backend(Protocol):
    """Everything that runs on one device."""

    name: str
    device: torch.device
    cache: CacheOps
    sampling: SamplingOps
    trees: TreeOps

    def activate(self) -> None:
        """Make the device current in this thread, before a step."""

    def check_limits(self, *, block_size: int, max_batch_size: int) -> None:
        """Refuse what the kernels cannot take.

        Raises:
            ValueError: names the argument, the value and what is allowed.
        """

    def supports(self, dtype: torch.dtype) -> bool:
        """Whether models of this dtype run at full speed; others run, but "auto" does not choose them."""

    def layer_ops(self, dtype: torch.dtype, traits: frozenset[str]) -> LayerOps:
        """The operations of a model's layers: the fastest that know its dtype and all of its traits."""

    def prepare(self, model: Any, kv: KVTensor, limits: PassLimits, counts: PassCounts) -> Runner:
        """The runner of a model: the fastest way that knows all of the model's traits.

        Args:
            model: a `Model` made with this back end's `layer_ops`.
            kv: of the model.
            limits: of small passes.
            counts: of passes, counted in where small ones are replayed.

        Raises:
            ValueError: the kernels cannot take the model.
        """

    def memory_for_kv(self, run_largest_passes: Callable[[], None]) -> int:
        """Bytes that the KV caches may take where the user has not said how many.

        Args:
            run_largest_passes: called where that is how to find out.
        """

    def upload(self, arrays: Sequence[NDArray[Any]]) -> list[Tensor]:
        """Arrays as tensors of the same dtypes and shapes on the device, without waiting for it; they may share memory."""

    def download(self, tensors: Sequence[Tensor]) -> list[NDArray[Any]]:
        """Tensors as arrays on the host; waits until the device has made them. They may share memory."""

    def facts(self) -> dict[str, str]:
        """What people should know of it, by name."""
