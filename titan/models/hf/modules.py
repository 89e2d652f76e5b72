"""Modules that stand in for those of transformers: packed linear layers, fused norms and gated feed-forward parts.

Each is made from the module whose place it takes, whose weights it holds in the layout of the back end.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan.kernels.interfaces import LayerOps

MLP_LAYERS = (("gate_proj", "up_proj", "down_proj"), ("gate_up_proj", "down_proj"))
"""Names of the linear layers of gated feed-forward parts."""
ACTIVATIONS = ("act_fn", "activation_fn")
"""Names of their activations."""
PIECE = 4096
"""Outputs of a linear layer that are computed together where its weight is cast."""


class PackedWeight:
    """The weights and biases of linear layers that read the same input, packed as one."""

    def __init__(self, ops: LayerOps, *linears: nn.Linear) -> None:
        weights: list[Tensor] = [linear.weight.detach() for linear in linears]
        self.weight = ops.pack(weights[0] if len(weights) == 1 else torch.cat(weights))
        self.bias: Tensor | None = None
        if any(linear.bias is not None for linear in linears):
            biases: list[Tensor] = [
                w.new_zeros(len(w)) if linear.bias is None else linear.bias for w, linear in zip(weights, linears, strict=True)
            ]
            self.bias = torch.cat(biases).detach()


class PackedLinear(nn.Module):
    """A linear layer with a packed weight, made of a plain one whose weight may be of fewer bits than the model."""

    def __init__(self, ops: LayerOps, linear: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__()
        self.in_features, self.out_features, self.dtype = linear.in_features, linear.out_features, dtype
        self.packed = PackedWeight(ops, linear)
        if self.packed.bias is not None:
            self.packed.bias = self.packed.bias.to(dtype)
        self._ops = ops

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer: [..., in_features] -> [..., out_features]."""
        output = self._ops.linear(x.reshape(-1, self.in_features), self.packed.weight, self.packed.bias)
        return output.view(*x.shape[:-1], self.out_features)


class PackedEmbedding(nn.Module):
    """The rows of an output head that is packed, as embeddings, which a scale may multiply."""

    def __init__(self, ops: LayerOps, weight: Tensor, size: int, scale: Tensor | None) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = len(weight), size  # as of an `nn.Embedding`, which code of a checkpoint may read
        self._ops, self._weight, self._scale = ops, weight, scale

    def forward(self, token_ids: Tensor) -> Tensor:
        """Look tokens up: int64 [...] -> [..., size]."""
        rows = self._ops.look_up(token_ids.reshape(-1), self._weight, self.embedding_dim)
        return (rows if self._scale is None else rows * self._scale).view(*token_ids.shape, self.embedding_dim)


class FusedNorm(nn.Module):
    """RMSNorm over the last dimension."""

    def __init__(self, ops: LayerOps, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.gains, self.eps = weight, eps
        self._ops = ops

    def forward(self, x: Tensor) -> Tensor:
        """Normalize rows: [..., size] -> [..., size]."""
        return self._ops.rms_norm(x.reshape(-1, x.shape[-1]), self.gains, self.eps).view(x.shape)


class GatedMlp(nn.Module):
    """A gated feed-forward part; its activation is SiLU if none is given."""

    def __init__(
        self, ops: LayerOps, gate_up: Sequence[nn.Linear], down: nn.Linear, activation: Callable[[Tensor], Tensor] | None
    ) -> None:
        super().__init__()
        self._ops, self._activation = ops, activation
        self._gate_up, self._down = PackedWeight(ops, *gate_up), PackedWeight(ops, down)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the part: [..., size] -> [..., size]."""
        rows, gate_up, down = x.reshape(-1, x.shape[-1]), self._gate_up, self._down
        if self._activation is None:
            return self._ops.gated_mlp(rows, gate_up.weight, gate_up.bias, down.weight, down.bias).view(x.shape)
        gate, up = self._ops.linear(rows, gate_up.weight, gate_up.bias).chunk(2, -1)
        return self._ops.linear(self._activation(gate) * up, down.weight, down.bias).view(x.shape)


def fuse_norm(ops: LayerOps, module: nn.Module) -> FusedNorm | None:
    """Return a fused norm that computes what a module does; ``None`` if there is none."""
    tensors, weight = [*module.parameters(), *module.buffers()], getattr(module, "weight", None)
    epsilons = {each for each in vars(module).values() if isinstance(each, float) and 0 <= each < 1}
    if len(tensors) != 1 or type(weight) is not nn.Parameter or weight.ndim != 1 or not epsilons or not takes_rows(module):
        return None
    weight = weight.detach()
    inputs = mixed_rows(weight)
    inputs[-1] = 0
    inputs[-1, module(torch.ones_like(weight)[None]).abs().argmax()] = 100  # the largest output that there can be
    expected = module(inputs)
    gains = [weight, weight.float(), 1 + weight.float()]
    found = [FusedNorm(ops, each, eps) for eps in sorted(epsilons) for each in gains]
    nearest = min(found, key=lambda fused: difference(fused(inputs), expected))
    return nearest if is_close(nearest(inputs), expected) else None


def fuse_mlp(ops: LayerOps, module: nn.Module, dtype: torch.dtype) -> GatedMlp | None:
    """Return a fused feed-forward part that computes what a module does in a dtype; ``None`` if there is none."""
    layers = next((names for names in MLP_LAYERS if all(hasattr(module, name) for name in names)), ())
    activation = next((getattr(module, name) for name in ACTIVATIONS if hasattr(module, name)), None)
    linears = [getattr(module, name) for name in layers]
    if not linears or not callable(activation) or not all(map(is_plain_linear, linears)) or not takes_rows(module):
        return None
    if any(each.weight.dtype != dtype for each in linears):
        return None
    inputs, numbers = mixed_rows(linears[0].weight), torch.linspace(-9, 9, 999).to(linears[0].weight)[:, None]
    is_silu = is_close(F.silu(numbers), activation(numbers))
    fused = GatedMlp(ops, linears[:-1], linears[-1], None if is_silu else activation)
    return fused if is_close(fused(inputs), module(inputs)) else None


def fuse_embedding(ops: LayerOps, module: nn.Module, packed: Tensor, dtype: torch.dtype) -> PackedEmbedding | None:
    """Return embeddings that read a packed weight; ``None`` if the module does something else than to look up and to scale.

    Its own weight, [num_embeddings, size], may be of fewer bits than the model.
    """
    if not is_unhooked(module):
        return None
    padding_idx = getattr(module, "padding_idx", None)
    if padding_idx is not None:
        module.padding_idx = 0  # type: ignore[assignment]  # it may be beyond the rows that are tried
    weight = module.get_parameter("weight")
    token_ids, numbers = torch.linspace(0, len(weight) - 1, min(len(weight), 64), device=weight.device).long(), weight.data
    rows = numbers[token_ids].to(dtype)
    weight.data = rows.clone()  # the module may write to it, and all of it would be much to cast
    scaled = module(torch.arange(len(rows), device=rows.device))
    weight.data = numbers
    if padding_idx is not None:
        module.padding_idx = padding_idx
    place = rows.abs().argmax()
    for scale in (None, (scaled.flatten()[place] / rows.flatten()[place]), getattr(module, "embed_scale", None)):
        factor = torch.as_tensor(scale, dtype=dtype, device=weight.device) if scale is not None else None
        if torch.equal(scaled, rows if factor is None else rows * factor):
            fused = PackedEmbedding(ops, packed, weight.shape[1], factor)
            is_same = torch.equal(fused(token_ids), scaled) and is_close(module(token_ids), scaled.to(weight.dtype))
            return fused if is_same else None
    return None


def is_plain_linear(module: nn.Module) -> bool:
    """Whether a module is a linear layer and nothing else: its class is that of PyTorch, and its weight is a plain tensor."""
    return type(module) is nn.Linear and type(module.weight) is nn.Parameter and is_unhooked(module)


def apply_linear(linear: nn.Linear, rows: Tensor) -> Tensor:
    """Apply a plain linear layer in the dtype of its input, to which its weight is cast piece by piece: [T, in] -> [T, out]."""
    pieces = linear.weight.detach().split(PIECE)
    biases = [None] * len(pieces) if linear.bias is None else linear.bias.detach().to(rows.dtype).split(PIECE)
    return torch.cat([F.linear(rows, piece.to(rows.dtype), bias) for piece, bias in zip(pieces, biases, strict=True)], -1)


def is_unhooked(module: nn.Module) -> bool:
    """Whether calling a module calls the method of its class alone."""
    hooks = module._forward_hooks, module._forward_pre_hooks, module.__dict__.get("forward")
    return not any(hooks)


def takes_rows(module: nn.Module) -> bool:
    """Whether a module takes one tensor and nothing else."""
    return is_unhooked(module) and len(inspect.signature(module.forward).parameters) == 1


def is_close(found: Tensor, expected: Tensor) -> bool:
    """Whether rows, [..., size], are the same up to rounding: of the dtype, and in float32 of sums in another order."""
    return difference(found, expected) <= max(1e-5, 2 * torch.finfo(expected.dtype).eps)


def difference(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference of a row from what it should be, [..., size], in norms of that."""
    if found.dtype != expected.dtype or found.shape != expected.shape:
        return math.inf
    errors, sizes = (found.double() - expected.double()).norm(dim=-1), expected.double().norm(dim=-1)
    largest = float((errors / sizes.clamp(min=1e-30)).max())
    return math.inf if math.isnan(largest) else largest


def mixed_rows(weight: Tensor) -> Tensor:
    """Return random rows of several sizes, inputs of a weight [..., in_features]: the smallest tell where an eps is added."""
    sizes = torch.tensor([1e-4, 1e-2, 0.1, 1, 1, 10, 100])
    rows = torch.randn(len(sizes), weight.shape[-1], generator=torch.Generator().manual_seed(0))
    return ((rows + 0.5) * sizes[:, None]).to(weight)  # with a mean, which a norm may drop
