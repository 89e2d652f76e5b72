"""Protocols that a back end implements, and the data that they exchange.

A back end belongs to one device. `titan.kernels.backend.choose_backend` chooses it once, and it is passed to the parts of the
engine that need it; none of them checks which device or library it is. A new back end is one folder.

Legend: T query tokens, H query heads, K KV heads of dimension D; L rows of logits; S trees to verify.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor

from titan.core.arrays import Flags, Ints
from titan.core.attention import AttentionSpec
from titan.core.batch import RaggedBatch
from titan.core.growth import Feed, GrowthSpec
from titan.core.kv_tensor import KVLayout, KVTensor
from titan.core.sampling_rows import SamplingRows
from titan.core.trees import DraftTrees


class TokenPlaces(NamedTuple):
    """Positions of a pass's tokens in their sequences, and slots in the cache."""

    rope_table: Tensor  # [max_positions, 2, D], see `titan.models.rope.rope_table`
    positions: Tensor  # int64 [T], below max_positions
    slots: Tensor  # int64 [T], distinct


class LayerOps(Protocol):
    """The operations of a decoder layer."""

    name: str
    packs: bool  # whether `pack` copies weights to a layout of its own
    packs_8_bits: bool  # whether `pack` can round weights to 8 bits, which `linear` then reads faster

    def pack(self, weight: Tensor, bits: int | None = None) -> Tensor:
        """Return a weight [out_features, in_features] in the layout that `linear` reads fastest; unchanged if that is its own.

        With ``bits=8``, allowed if `packs_8_bits`, its numbers are rounded to 3 bits of mantissa; it may be overwritten.
        """

    def look_up(self, token_ids: Tensor, embedding: Tensor, size: int) -> Tensor:
        """Return rows of an embedding of ``size`` dimensions, packed or plain: int64 [T] -> [T, size]."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Compute ``x @ weight.T + bias`` with a packed or plain weight: [rows, in_features] -> [rows, out_features]."""

    def plan_attention(self, layout: Any) -> Any:
        """Prepare `tree_attention` for all layers of a pass, from `PassInputs.attention`."""

    def tree_attention(self, q: Tensor, kv_layer: Tensor, plan: Any, spec: AttentionSpec, sinks: Tensor | None = None) -> Tensor:
        """Attend from every query token to the slots it sees.

        Args:
            q: [T, H, D], the last dimension contiguous.
            kv_layer: [2, K, num_blocks, block_size, D], keys and values or quantised blocks of them, a view of a `KVTensor`. It
                already holds those of the query tokens, which are read as they are stored. [1, ...]: values are the first numbers
                of keys.
            plan: from `plan_attention`.
            spec: of the layer.
            sinks: float32 [H], an additional score per head in its softmax, which adds nothing to the output (gpt-oss).

        Returns:
            [T, H * V], dtype of ``q``; V = ``spec.value_dim`` or D.
        """

    def write_kv(self, kv_layer: Tensor, slots: Tensor, keys: Tensor, values: Tensor | None) -> None:
        """Write keys and values to their slots.

        Args:
            kv_layer: [2, K, num_blocks, block_size, D], updated in place; if it is quantised, so are keys and values.
            slots: int64 [T], distinct.
            keys: [T, K, D].
            values: [T, K, V], V at most D; the rest of their slots is not read. ``None``: the layer has one plane, of keys.
        """

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Compute ``x / sqrt(mean(x ** 2) + eps) * weight`` over the last dimension, in float32: [T, size] -> [T, size].

        A float32 weight is multiplied before the result is rounded to the dtype of ``x``.
        """

    def linear_add_norm(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, norm_weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Apply a linear layer, add its output to the residual stream, and normalize the sum for the next part of the layer.

        Args:
            x: [T, in_features].
            weight: [out_features, in_features], packed or plain.
            bias: [out_features].
            residual: [T, out_features]; may be overwritten.
            norm_weight: [out_features], as ``weight`` of `rms_norm`.
            eps: as in `rms_norm`.

        Returns:
            The residual stream ``residual + x @ weight.T + bias``, and its RMSNorm, [T, out_features] each.
        """

    def rope_and_write_kv(self, qkv: Tensor, places: TokenPlaces, kv_layer: Tensor, qk_norm: Tensor | None, eps: float) -> Tensor:
        """Rotate queries and keys by their positions, and write keys and values to their slots.

        Args:
            qkv: [T, (H + 2 * K) * D]; may be overwritten.
            places: of the tokens; where the back end's runner pads passes, slot -1 writes nothing.
            kv_layer: [2, K, num_blocks, block_size, D], updated in place; if it is quantised, so are keys and values.
            qk_norm: [H + K, D], weights of an RMSNorm applied to each head before the rotation, as ``weight`` of `rms_norm`.
            eps: as in `rms_norm`.

        Returns:
            The queries: [T, H, D].
        """

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Compute ``silu(gate) * up``: [T, 2 * size] -> [T, size]."""

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        """Compute ``gelu(gate) * up`` with the approximation of GELU by tanh: [T, 2 * size] -> [T, size]."""

    def gated_mlp(self, x: Tensor, gate_up: Tensor, gate_up_bias: Tensor | None, down: Tensor, down_bias: Tensor | None) -> Tensor:
        """Apply a linear layer, `silu_mul` and another linear layer: [T, in_features] -> [T, out_features].

        Args:
            x: rows.
            gate_up: [2 * size, in_features], packed or plain.
            gate_up_bias: [2 * size].
            down: [out_features, size], packed or plain.
            down_bias: [out_features].
        """


@dataclass(frozen=True, slots=True, eq=False)
class PassInputs:
    """Inputs of a model for one pass, made from a batch by a back end's runner."""

    token_ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T], rope positions
    slot_mapping: Tensor  # int64 [T], where keys and values are written; -1 = nowhere
    logits_rows: Tensor | None  # int64 [L], query tokens whose logits are needed; None: all
    attention: Any  # layout for `LayerOps.plan_attention` of this back end


class Model(Protocol):
    """A causal language model as the engine and runners see it; `titan.models.decoder.Decoder` is one."""

    config: Any  # a `titan.models.config.ModelConfig`
    dtype: torch.dtype
    device: torch.device
    weight_bits: int | None  # bits to which the matrices of its linear layers were rounded; None: they were not

    @property
    def kv_layout(self) -> KVLayout:
        """The layout of the model's KV."""

    def hidden_states(self, inputs: PassInputs, kv: KVTensor) -> Tensor:
        """Run all but the output head: [L, hidden_size]."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Apply the output head: [L, hidden_size] -> [L, vocab_size]."""


WarmUp = Callable[[], object]
"""Compiles kernels, or records graphs, that would otherwise be made when they are first needed."""


class Runner(Protocol):
    """A model with its KV cache.

    ``padded_sizes`` are the numbers of tokens, ascending, to which smaller passes are padded; empty if passes are not padded.
    """

    @property
    def padded_sizes(self) -> Sequence[int]: ...

    def forward(self, batch: RaggedBatch) -> Tensor:
        """Run one pass over a ragged batch; return logits [L, vocab] of the rows that need them."""

    def grow(self, feeds: Sequence[Feed], num_rows: int, vocab_size: int) -> DraftTrees:
        """Feed a draft model the tokens that it lacks, and grow trees by their specs; without empty places if they are on the host.

        Args:
            feeds: one or more requests.
            num_rows: rows of the plan; rows without a feed get an empty tree.
            vocab_size: of the trees; the draft's tokens from this id on are not proposed, and are not in q.
        """

    def warm_up(self, specs: Sequence[GrowthSpec], vocab_size: int) -> Sequence[WarmUp]:
        """Return passes to run in advance, so that no pass of a request waits for a compiler or the recording of a graph.

        They may be run while requests are in flight: they change no KV, and are not counted.

        Args:
            specs: the largest spec of each kind that the model will `grow`.
            vocab_size: as in `grow`.
        """


class PathMove(NamedTuple):
    """An accepted path whose KV moves to the first slots of its tree."""

    block_ids: Sequence[int]  # block table of the request
    first_slot: int  # first slot of the tree in the request
    path: list[int]  # slots of the nodes, counted from first_slot


class CacheOps(Protocol):
    """Operations on paged KV besides the writes of layers; each works in place, on all groups of layers."""

    def zeros(self, shape: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return zeros for the blocks of a cache on the back end's device."""

    def empty(self, shape: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return, likewise, undefined numbers, which take no memory of the host before they are written, page by page."""

    def move_paths(self, kv: KVTensor, moves: Sequence[PathMove]) -> None:
        """Move node ``path[j]`` of each request to slot ``first_slot + j``; a path is read in full before it is written."""

    def copy_blocks(self, kv: KVTensor, sources: Ints, targets: Ints) -> None:
        """Copy whole blocks, int64 [n] each; targets are distinct, and none is also a source."""

    def clear_blocks(self, kv: KVTensor, block_ids: Ints) -> None:
        """Zero blocks, int64 [n], so that a new owner reads nothing of the former one."""

    def gather_blocks(self, source: KVTensor, target: KVTensor, block_ids: Ints) -> None:
        """Copy blocks, int64 [n], distinct, to the front of another cache, or of the same one; all other content of both is lost.

        If possible, the memory of another source is freed meanwhile, so that both caches are never in memory as a whole. If memory
        runs out, nothing has changed.
        """

    def host_blocks(self, kv: KVTensor, num_blocks: int) -> list[Tensor]:
        """Allocate zeros on the host for blocks of a cache: [num_blocks, num_layers, num_planes, K, ...] per group."""

    def copy_out(self, kv: KVTensor, host: Sequence[Tensor], sources: Ints, targets: Ints) -> None:
        """Copy whole blocks to the host, int64 [n > 0] each; they may be overwritten, or copied back, at once."""

    def copy_in(self, kv: KVTensor, host: Sequence[Tensor], sources: Ints, targets: Ints) -> None:
        """Copy whole blocks from the host, int64 [n > 0] each; passes may use them after `await_copies`."""

    def await_copies(self) -> None:
        """Make later passes wait until all blocks have been copied in; the caller does not wait."""


class SamplingOps(Protocol):
    """Operations over the whole vocabulary while a tree grows."""

    def argmax(self, logits: Tensor) -> Tensor:
        """Return each row's most likely token, the first of ties: [n, vocab] -> int64 [n]; -1 if its logit is not finite."""

    def top_candidates(self, logits: Tensor, count: int, temperatures: Tensor) -> tuple[Tensor, Tensor]:
        """Return the most likely tokens of each row with their log-probabilities: int64 and float32, [n, count] each.

        Args:
            logits: [n, vocab], any float dtype.
            count: tokens per row; if the vocabulary has fewer, the rest have log-probability -inf.
            temperatures: float32 [n], above 0; logits are divided by them.

        Returns:
            Tokens, the most likely first, and their log-probabilities; not finite in a row whose largest logit is not.
        """

    def probs(self, logits: Tensor, rows: SamplingRows) -> Tensor:
        """Return the distributions to sample from: temperature, then top-k, top-p, min-p.

        Returns:
            float32 [n, vocab], normalised; cut tokens have 0, and at temperature 0 the most likely token has 1. NaN in a row
            whose largest logit is not finite.
        """

    def sample_children(
        self, logits: Tensor, rows: SamplingRows, num_children: Ints, places: Tensor, probs: Tensor, children: Tensor
    ) -> None:
        """Sample the children of nodes without replacement.

        Args:
            logits: [n, vocab].
            rows: options of the n nodes, with the positions of the tokens to be sampled.
            num_children: int64 [n].
            places: int64 [n], the nodes' rows in the two tables below.
            probs: float32 [I, vocab]; rows ``places`` are overwritten with the distributions that are sampled from.
            children: int64 [I, most children]; rows ``places`` are overwritten with the tokens, from the left, then -1.
        """


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """Tokens that may become nodes of n requests: [n, c] each; parents precede children, and no score is above its parent's."""

    rows: Ints  # [n], of the plan
    num_nodes: Ints  # [n], places of the trees, at most c
    is_chain: Flags  # [n]
    has_scores: Flags | bool  # [n], or of all
    token_ids: Tensor  # int64
    scores: Tensor  # float32, cumulative log-probability; not finite where there is no candidate
    parent_slots: Tensor  # int64, slot where the parent is fed; -1 for the root
    slots: Tensor  # int64, slot where the candidate is fed; -1 if it is not fed
    probs: Tensor | None = None  # float32 [I, vocab], the distributions that tokens were sampled from
    # [n, 1 + slots], rows of probs: of the root, -1 if the request's tokens were not sampled; then of the node fed at each slot
    probs_rows: Ints | None = None


class Verified(NamedTuple):
    """The accepted path and the final token of each of S trees; tensors are on the device."""

    paths: Tensor  # int32 [S, any], accepted nodes from the root down, -1 after them
    final_tokens: Tensor  # int64 [S], recovered or bonus; -1 where it cannot be sampled


class TreeOps(Protocol):
    """Selection and verification of draft trees; the rules are stated in `titan.kernels.torch.trees`."""

    def select(self, found: Sequence[Candidates], num_rows: int) -> DraftTrees:
        """Select each request's best ancestor-closed set of candidates: the ones with the greatest cumulative probability.

        Ties go to the earlier candidate. The path of first children comes first, so that accepting it moves no KV.

        Args:
            found: candidates of all requests that draft; at most one entry has sampled tokens.
            num_rows: rows of the plan.
        """

    def verify(self, logits: Tensor, trees: DraftTrees, rows: Ints, sampling: SamplingRows) -> Verified:
        """Determine the accepted path and the final token of some trees.

        Args:
            logits: [L, vocab]; for each tree, the row of its root, then those of its nodes.
            trees: of a plan; rows that are not in ``rows`` have no nodes.
            rows: int64 [S], rows of the plan, ascending.
            sampling: options of the S requests; positions are those of the tokens that follow the roots.
        """


class PassLimits(NamedTuple):
    """Bounds on an engine's passes; decodes, verifications and drafting are its **small** passes."""

    num_requests: int
    query_len: int  # query tokens of one request in a small pass: the root and its draft tokens; 0: no pass is small
    num_blocks: int  # blocks of one request
    num_tokens: int  # query tokens of any pass


@dataclass(slots=True)
class PassCounts:
    """Counts of the passes of a target and its draft, replayed from graphs or run eagerly."""

    num_replayed: int = 0
    num_eager: int = 0

    @property
    def hit_rate(self) -> float | None:
        """Share of passes that were replayed; ``None`` if none was counted."""
        num_passes = self.num_replayed + self.num_eager
        return self.num_replayed / num_passes if num_passes else None


class KVMemory(NamedTuple):
    """Bytes of a device's memory once its models are loaded."""

    total: int
    free: int  # left by the largest passes; below 0 if these do not fit
    default: int  # part of it for the KV caches, unless a size is given


class Backend(Protocol):
    """Everything that runs on one device."""

    name: str
    device: torch.device
    is_host: bool  # whether tensors are in the host's memory, where reading them costs nothing
    cache: CacheOps
    sampling: SamplingOps
    trees: TreeOps

    def active(self) -> AbstractContextManager[None]:
        """Return a context in which this thread uses the device, with the settings of a step."""

    def check_limits(self, *, block_size: int, max_batch_size: int) -> None:
        """Reject limits that the kernels do not support.

        Raises:
            ValueError: names the argument, its value and what is allowed.
        """

    def supports(self, dtype: torch.dtype) -> bool:
        """Whether models of this dtype run at full speed; others run as well, but "auto" does not choose them."""

    def layer_ops(self, dtype: torch.dtype, traits: frozenset[str]) -> LayerOps:
        """Return the fastest operations of layers that support a model's dtype and all of its traits."""

    def prepare(self, model: Any, kv: KVTensor, limits: PassLimits, counts: PassCounts) -> Runner:
        """Return the fastest runner that supports all of a model's traits.

        Args:
            model: a `Model` made with this back end's `layer_ops`.
            kv: of the model.
            limits: of small passes.
            counts: updated by runners that replay small passes.

        Raises:
            ValueError: the kernels do not support the model.
        """

    def free_memory(self) -> int:
        """Return how many bytes can be allocated on the device, after PyTorch has released its reserve."""

    def utilization(self) -> float | None:
        """Return the share of recent time in which the device was busy; ``None`` if it does not report this."""

    def memory_for_kv(self, run_largest_passes: Callable[[], None]) -> KVMemory:
        """Return the memory for the KV caches.

        Args:
            run_largest_passes: called by back ends that measure what is left.
        """

    def upload(self, arrays: Sequence[NDArray[Any]]) -> list[Tensor]:
        """Return arrays as tensors of the same dtypes and shapes on the device, without synchronizing; they may share memory."""

    def download(self, tensors: Sequence[Tensor]) -> list[NDArray[Any]]:
        """Return tensors as arrays on the host; waits until the device has computed them. They may share memory."""

    def mark(self) -> Any:
        """Return a mark of the time when the device is done with all that was launched so far, without waiting; on a host, now."""

    def seconds_between(self, marks: Sequence[Any]) -> list[float]:
        """Return the seconds from each mark to the next, on the device's clock; waits until the device has passed the last one."""

    def warm_up(self, vocab_size: int, dtype: torch.dtype) -> Sequence[WarmUp]:
        """Return calls that compile the operations on trees and distributions; none if nothing is compiled at run time.

        Args:
            vocab_size: of the target.
            dtype: of its logits.
        """

    def facts(self) -> dict[str, str]:
        """Return facts about the back end to show to users, by name."""
