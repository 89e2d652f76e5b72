"""Triton's interpreter without what it does again for every call, type, number and sum: it takes a quarter of the time."""

from __future__ import annotations

from functools import wraps
from types import SimpleNamespace
from typing import Any

import numpy as np
import triton.language as tl
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

PLAIN_TYPES = {each.name for each in (tl.int1, tl.int32, tl.int64, tl.float32)}
"""Types of which two operands of one shape need no cast, whatever the operation."""

COMPUTED_TYPES = {each.name for each in (tl.int32, tl.uint32, tl.int64, tl.float32, tl.float64)}
INTEGER_TYPES = {each.name for each in (tl.int1, tl.int32, tl.uint32, tl.int64)}
"""Of those, what numbers are computed and compared of at once; and what is combined bit by bit."""

WIDENED = {("int32", "int64"), ("int64", "int32")}
"""Of which numpy widens one, as Triton does."""

COMPARISONS = {
    "less_than": np.less,
    "less_equal": np.less_equal,
    "greater_than": np.greater,
    "greater_equal": np.greater_equal,
    "equal": np.equal,
    "not_equal": np.not_equal,
}
BITWISE = {"and_": np.bitwise_and, "or_": np.bitwise_or, "xor_": np.bitwise_xor}
OPERATIONS = {"add": np.add, "sub": np.subtract, "mul": np.multiply} | COMPARISONS | BITWISE
FLAGS = {"add": (True, True), "sub": (True, False)}
"""Of how the operation checks its operands."""
TYPES: dict[tuple[str, tuple[int, ...]], tl.block_type] = {}
"""Of blocks, by the name of what they hold and their shape."""


def make_quick() -> None:
    """Replace what is slow in the interpreter, of this process and for good; kernels compute and refuse the same."""
    _patch_language_once()
    _keep_types()
    _combine_at_once()
    _compute_at_once()
    TritonSemantic.binary_op_sanitize_overflow_impl = _check_overflow
    interpreter.TensorHandle.__init__ = _init_handle


def _patch_language_once() -> None:
    """Give the language its interpreted functions now; else they are looked up whenever a function is called."""
    interpreter._patch_attr = _patch_attr
    scope = interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    interpreter._patch_lang = lambda _: type(scope)()  # with nothing to restore


def _patch_attr(language: Any, name: str, member: Any, *_: Any) -> None:
    """Call the function behind a builtin at once; the builtin would check that it is called in a kernel."""
    function, semantic = getattr(member, "__wrapped__", member), interpreter.interpreter_semantic

    def interpreted(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = semantic
        return function(*args, **kwargs)

    setattr(language, name, interpreted)


def _combine_at_once() -> None:
    """Let operands of one type and shape be, and keep those that numbers become beside a tensor; else types are promoted, values
    cast and shapes compared."""
    combine, broadcast, unwrap = (
        TritonSemantic.binary_op_type_checking_impl,
        TritonSemantic.broadcast_impl_value,
        core._unwrap_if_constexpr,
    )
    kept: dict[Any, tl.tensor] = {}
    plain = {tl.tensor, tl.dtype, tl.block_type, tl.pointer_type, bool, int, float, str, type(None)}
    is_equal = tl.dtype.__eq__

    def quick_combine(self: TritonSemantic, lhs: Any, rhs: Any, *flags: bool, **named: bool) -> tuple[tl.tensor, tl.tensor]:
        is_first = type(lhs) is tl.tensor
        tensor, number = (lhs, rhs) if is_first else (rhs, lhs)
        if type(tensor) is not tl.tensor:
            return combine(self, lhs, rhs, *flags, **named)
        if type(number) is tl.tensor:
            if lhs.dtype is rhs.dtype and lhs.shape is rhs.shape and lhs.dtype.name in PLAIN_TYPES:
                return lhs, rhs
            return combine(self, lhs, rhs, *flags, **named)
        key = type(number), repr(number), is_first, tensor.dtype.name, id(tensor.shape), flags, *named.items()  # 0.0 == -0.0
        if key not in kept:
            pair = combine(self, lhs, rhs, *flags, **named)
            if pair[not is_first] is not tensor:
                return pair
            kept[key] = pair[is_first]
            kept[key].handle.data.flags.writeable = False
        return (tensor, kept[key]) if is_first else (kept[key], tensor)

    def quick_broadcast(self: TritonSemantic, lhs: tl.tensor, rhs: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
        return (lhs, rhs) if lhs.shape is rhs.shape else broadcast(self, lhs, rhs)

    def quick_unwrap(value: Any) -> Any:
        return value if type(value) in plain else unwrap(value)

    TritonSemantic.binary_op_type_checking_impl, TritonSemantic.broadcast_impl_value = quick_combine, quick_broadcast
    core._unwrap_if_constexpr = quick_unwrap
    tl.dtype.__eq__ = lambda self, other: self is other or is_equal(self, other)


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


def _compute_at_once() -> None:
    """Let numpy compute with operands of one type and broadcast them; else each of a dozen functions looks at their types first."""
    for name, compute in OPERATIONS.items():
        setattr(TritonSemantic, name, _quick_operation(getattr(TritonSemantic, name), compute))


def _quick_operation(operation: Any, compute: np.ufunc) -> Any:
    name, flags = operation.__name__, FLAGS.get(operation.__name__, ())
    compares, is_bitwise, is_exact = name in COMPARISONS, name in BITWISE, name in ("add", "sub", "mul")

    @wraps(operation)
    def computed(self: TritonSemantic, lhs: Any, rhs: Any, sanitize_overflow: bool = False) -> tl.tensor:
        options = (sanitize_overflow,) if is_exact else ()
        if type(lhs) is not tl.tensor or type(rhs) is not tl.tensor:
            lhs, rhs = self.binary_op_type_checking_impl(lhs, rhs, *flags)
        is_widened = (lhs.dtype.name, rhs.dtype.name) in WIDENED
        dtype = tl.int64 if is_widened else lhs.dtype
        if name == "add" and dtype.is_ptr() and rhs.dtype.name in ("int32", "int64"):
            handle = self.builder.create_addptr(lhs.handle, rhs.handle)
        elif (dtype is not rhs.dtype and not is_widened) or dtype.name not in (INTEGER_TYPES if is_bitwise else COMPUTED_TYPES):
            return operation(self, lhs, rhs, *options)
        elif is_exact and dtype.name in ("int32", "uint32"):
            exact = compute(lhs.handle.data, rhs.handle.data, dtype=np.int64)
            handle = interpreter.TensorHandle(exact.astype(dtype.name), dtype)
            if sanitize_overflow and not np.logical_and.reduce(handle.data == exact, axis=None):
                raise AssertionError(f"{dtype.name} overflow detected for operation {name}")
        else:
            handle = interpreter.TensorHandle(compute(lhs.handle.data, rhs.handle.data), dtype)
        return tl.tensor(handle, _type_of(handle.data, tl.int1 if compares else dtype, lhs, rhs))

    return computed


def _type_of(data: np.ndarray[Any, Any], dtype: tl.dtype, lhs: tl.tensor, rhs: tl.tensor) -> tl.dtype:
    """Of numbers that two tensors give."""
    if not lhs.type.is_block() and not rhs.type.is_block():
        return dtype
    key = dtype.name, data.shape
    if key not in TYPES:
        TYPES[key] = tl.block_type(dtype, list(data.shape))
    return TYPES[key]


def _init_handle(self: interpreter.TensorHandle, data: np.ndarray[Any, Any], dtype: tl.dtype) -> None:
    """Whether numpy's numbers are wider than those of the type is asked where they are computed."""
    self.data, self.dtype, self.attr = data, dtype, {}


def _check_overflow(self: TritonSemantic, lhs: tl.tensor, rhs: tl.tensor, operation: Any) -> None:
    """Refuse sums, differences and products of integers that need more bits; without interpreting a dozen operations."""
    integer = lhs.type.scalar
    if integer.int_bitwidth < 64:
        compute = {"add": np.add, "sub": np.subtract, "mul": np.multiply}[operation.__name__]
        exact = compute(lhs.handle.data.astype(np.int64), rhs.handle.data.astype(np.int64))
        is_exact = integer.get_int_min_value() <= exact.min() and exact.max() <= integer.get_int_max_value()
        assert is_exact, f"int{integer.int_bitwidth} overflow detected for operation {operation.__name__}"
