"""Triton's interpreter without what it does again for every call, type and sum: it takes a third of the time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def make_quick() -> None:
    """Replace what is slow in the interpreter, of this process and for good; kernels compute and refuse the same."""
    _patch_language_once()
    _keep_types()
    TritonSemantic.binary_op_sanitize_overflow_impl = _check_overflow


def _patch_language_once() -> None:
    """Give the language its interpreted functions now; else they are looked up whenever a function is called."""
    scope = interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    interpreter._patch_lang = lambda _: type(scope)()  # with nothing to restore


def _keep_types() -> None:
    """Keep each type and each shape of tensors; else they are built again for every value."""
    make_tensor, make_block_type, find_dtype = tl.tensor.__init__, tl.block_type.__init__, interpreter._get_np_dtype
    shapes: dict[Any, tuple[tl.tuple, tl.constexpr]] = {}
    block_types: dict[Any, dict[str, Any]] = {}
    dtypes: dict[str, np.dtype[Any]] = {}

    def init_tensor(self: tl.tensor, handle: Any, kind: tl.dtype) -> None:
        shape = tuple(kind.shape) if kind.is_block() else ()
        if shape not in shapes:
            make_tensor(self, handle, kind)
            shapes[shape] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, kind, kind.scalar
        self.shape, self.numel = shapes[shape]

    def init_block_type(self: tl.block_type, element_ty: tl.dtype, shape: Any) -> None:
        key = element_ty.name, tuple(shape)
        if key not in block_types:
            make_block_type(self, element_ty, shape)
            block_types[key] = dict(self.__dict__)
        self.__dict__.update(block_types[key])

    def np_dtype(dtype: tl.dtype) -> np.dtype[Any]:
        name = dtype.scalar.name
        if name not in dtypes:
            dtypes[name] = find_dtype(dtype)
        return dtypes[name]

    tl.tensor.__init__, tl.block_type.__init__, interpreter._get_np_dtype = init_tensor, init_block_type, np_dtype


def _check_overflow(self: TritonSemantic, lhs: tl.tensor, rhs: tl.tensor, operation: Any) -> None:
    """Refuse sums, differences and products of integers that need more bits; without interpreting a dozen operations."""
    integer = lhs.type.scalar
    if integer.int_bitwidth < 64:
        compute = {"add": np.add, "sub": np.subtract, "mul": np.multiply}[operation.__name__]
        exact = compute(lhs.handle.data.astype(np.int64), rhs.handle.data.astype(np.int64))
        is_exact = integer.get_int_min_value() <= exact.min() and exact.max() <= integer.get_int_max_value()
        assert is_exact, f"int{integer.int_bitwidth} overflow detected for operation {operation.__name__}"
