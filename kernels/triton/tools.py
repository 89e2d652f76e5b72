"""Tools of the Triton kernels: checks of their arguments, and arithmetic that is also correct in Triton's interpreter.

The interpreter (``TRITON_INTERPRET=1``, set before triton is imported) multiplies the bit patterns of bfloat16 numbers and
truncates where hardware rounds to nearest even (triton-lang/triton issue 11584). So kernels compute in float32, and `dot` and
`narrow` do by hand there what it gets wrong.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan.core.kv_tensor import kv_planes

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether kernels of this process run in Triton's interpreter, on the CPU."""

EMULATED = tl.constexpr(INTERPRETED)
"""The same, for kernels."""

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes of models, activations and KV."""


def require(
    name: str,
    tensor: Tensor,
    *,
    shape: Sequence[int | None],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
    contiguous: bool = True,
    is_written: bool = False,
) -> None:
    """Reject a tensor that a kernel does not support, before a launch.

    Args:
        name: of the argument, for the message.
        tensor: the argument.
        shape: expected; ``None`` = any size.
        dtypes: allowed dtypes.
        device: where the kernel runs.
        contiguous: whether all of it must be contiguous; otherwise its last dimension must be.
        is_written: whether the kernel writes to it, so that no two of its numbers may share memory.

    Raises:
        ValueError: names the argument, its value and what is expected.
    """
    found = tensor.shape
    if len(found) != len(shape) or [size for size, got in zip(shape, found, strict=True) if size is not None and size != got]:
        expected = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} has shape {list(found)}: it must be [{expected}]")
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name} has dtype {tensor.dtype}: it must be {' or '.join(map(str, dtypes))}")
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}: it must be on {device}")
    if contiguous and not tensor.is_contiguous():
        raise ValueError(f"{name} has strides {tensor.stride()}: it must be contiguous")
    if not contiguous and shape and found[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name} has strides {tensor.stride()}: its last dimension must be contiguous")
    if is_written and not contiguous and any(size > 1 and not stride for size, stride in zip(found, tensor.stride(), strict=True)):
        raise ValueError(f"{name} has strides {tensor.stride()}: it is written to, and must not be expanded")


def kv_arguments(kv_layer: Tensor, head_dim: int) -> tuple[Tensor, Tensor | None, Sequence[int]]:
    """Return what kernels take of a layer: its numbers, their scales if they are quantised, and the strides of both.

    These are [planes, K, num_blocks, block_size, D] and [planes, K, num_blocks, block_size]; their last strides, 1, are left out.

    Raises:
        ValueError: quantised blocks that are not whole slots.
    """
    numbers, scales = kv_planes(kv_layer, head_dim) if kv_layer.dtype == torch.int8 else (kv_layer, None)
    return numbers, scales, [*numbers.stride()[:4], *((0, 0, 0) if scales is None else scales.stride()[:3])]


def is_launchable(device: torch.device) -> bool:
    """Whether Triton kernels of this process run on the device."""
    return device.type == ("cpu" if INTERPRETED else "cuda")


def require_launchable(name: str, device: torch.device) -> None:
    """Reject the device of an argument on which Triton kernels of this process cannot run now.

    Raises:
        ValueError: it is neither a CUDA device nor, in the interpreter, the CPU; or it is not the current CUDA device, on which
            Triton launches wherever the tensors are.
    """
    if not is_launchable(device):
        where = "the CPU, since TRITON_INTERPRET is set" if INTERPRETED else "a CUDA device"
        raise ValueError(f"{name} is on {device}: Triton kernels of this process run on {where}")
    if device.type == "cuda" and device.index != (current := torch.cuda.current_device()):
        raise ValueError(f"{name} is on {device}, but cuda:{current} is current: call torch.cuda.set_device() in this thread first")


@triton.jit
def dot(a, b):
    """Compute ``a @ b`` of two tiles, summed in float32; float32 tiles are multiplied in float32, not in TF32."""
    if EMULATED:
        product = tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        product = tl.dot(a, b, input_precision="ieee")
    return product


@triton.jit
def narrow(x, DTYPE: tl.constexpr):
    """Round float32 ``x`` to nearest even in ``DTYPE``; NaN and infinities are kept."""
    if EMULATED and DTYPE == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = bits + 0x7FFF + ((bits >> 16) & 1)
        is_finite = (bits & 0x7F800000) != 0x7F800000
        bits = tl.where(is_finite, rounded, bits) & 0xFFFF0000
        result = bits.to(tl.float32, bitcast=True).to(tl.bfloat16)  # exact: the bits cut off are 0
    else:
        result = x.to(DTYPE)
    return result
