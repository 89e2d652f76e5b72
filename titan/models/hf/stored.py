"""The tensors of a checkpoint in their files, as transformers' loading takes them: none is in memory for longer than it is used."""

from __future__ import annotations

import json
import math
import mmap
import re
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import EllipsisType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from titan.core.dtypes import dtype_name
from titan.models.files import INTEGERS_NEED

MAX_COPIED_BYTES = 2**16
"""Size of the largest matrix that is copied at once, as are all vectors: most of these are not packed."""
NARROW_DTYPES = (torch.bfloat16, torch.float16)
"""Dtypes whose numbers float32 holds as they are."""
STORED_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Dtypes by their names in safetensors."""
EXPERT = re.compile(r"(.*\bexperts)\.(\d+)\.(.+)")
"""A tensor of one expert: the list, its place in it, and its name there."""

MISSING, UNEXPECTED, MISSHAPEN = "missing", "unexpected", "of another shape"
"""What may be wrong with a tensor."""


class _MappedFile:
    """A file whose bytes are mapped; PyTorch needs them to be writable, but nobody writes to them."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self.header_size = 8 + int.from_bytes(self._bytes[:8], "little")
        self.header: dict[str, Any] = json.loads(self._bytes[8 : self.header_size])
        self._address = np.frombuffer(self._bytes, np.uint8).ctypes.data

    def read(self, first: int, num_bytes: int) -> Tensor:
        """Return bytes in place: uint8 [num_bytes]; their pages leave the memory with the tensor, and not with the file."""
        array = np.frombuffer(self._bytes, np.uint8, num_bytes, first)
        start, end = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE, (first + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if start < end and hasattr(mmap, "MADV_DONTNEED"):
            weakref.finalize(array, self._bytes.madvise, mmap.MADV_DONTNEED, start, end - start).atexit = False
        return torch.from_numpy(array)

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor is in the file."""
        return 0 <= tensor.data_ptr() - self._address < len(self._bytes)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a checkpoint, with what transformers' loading asks of safetensors' slices."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    first: int  # byte, in the file
    run_dtype: torch.dtype  # of the model
    file: _MappedFile = field(repr=False)

    def __getitem__(self, _all: EllipsisType) -> StoredTensor:
        return self

    def to(self, device: Any, dtype: torch.dtype) -> Tensor:
        """Return the tensor; of a model that runs in float32, those of 16 bits are to be widened when they are used.

        Args:
            device: of the result.
            dtype: of the result, except for those.

        Raises:
            ValueError: numbers of it are not finite in the dtype, or integers, which would count as they are.
        """
        if dtype.is_floating_point and not self.dtype.is_floating_point:
            raise ValueError(f"weight {self.name!r} has dtype {dtype_name(self.dtype)}: {INTEGERS_NEED}")
        if self.dtype.is_floating_point and dtype.is_floating_point and self.dtype.itemsize > 1 and 0 not in self.shape:
            low, high = self._mapped().aminmax()
            if not (low >= torch.finfo(dtype).min and high <= torch.finfo(dtype).max):  # a NaN fails as well
                raise not_finite(self.name, dtype)
        is_kept = self.run_dtype == dtype == torch.float32 and self.dtype in NARROW_DTYPES
        found = self._mapped().to(device, self.dtype if is_kept else dtype)
        return found.clone() if found.nbytes <= MAX_COPIED_BYTES or found.ndim == 1 else found

    def _mapped(self) -> Tensor:
        num_bytes = self.dtype.itemsize * math.prod(self.shape)
        return self.file.read(self.first, num_bytes).view(self.dtype).view(self.shape)


def not_finite(name: str, dtype: torch.dtype) -> ValueError:
    """Return what is wrong with a weight that has numbers beyond those of a dtype."""
    return ValueError(f"weight {name!r} has numbers that are not finite in {dtype_name(dtype)}: NaN and infinities are not allowed")


def find_stored(paths: Sequence[Path], run_dtype: torch.dtype) -> dict[str, StoredTensor]:
    """Return the tensors of sound safetensors files by name.

    Args:
        paths: of the files.
        run_dtype: of the model.

    Raises:
        ValueError: one has a dtype that is unknown.
    """
    found = {}
    for file in map(_MappedFile, paths):
        for name, entry in file.header.items():
            if name == "__metadata__":
                continue
            if entry["dtype"] not in STORED_DTYPES:
                allowed = ", ".join(STORED_DTYPES)
                raise ValueError(f"weight {name!r} has dtype {entry['dtype']}, which is not supported: it must be one of {allowed}")
            first = file.header_size + entry["data_offsets"][0]
            found[name] = StoredTensor(name, tuple(entry["shape"]), STORED_DTYPES[entry["dtype"]], first, run_dtype, file)
    return found


def copy_mapped(model: nn.Module, stored: Mapping[str, StoredTensor]) -> None:
    """Copy those weights of a model that are still in their files, which may be changed while the model runs."""
    files = {each.file for each in stored.values()}
    for weight in model.parameters():
        if any(file.holds(weight) for file in files):
            weight.data = weight.detach().clone()


def misfits(stored: Mapping[str, StoredTensor], num_experts: int | None) -> dict[str, list[str]]:
    """Return the tensors by which the experts of a layer differ from most of them, by what is wrong.

    transformers stacks what it finds, in the order of the numbers. Unexpected tensors may be right: experts that compute
    nothing may have some (LongCat).

    Args:
        stored: all tensors.
        num_experts: as the config has it; ``None``: unknown.
    """
    lists: dict[str, dict[int, dict[str, tuple[int, ...]]]] = {}
    for name, tensor in stored.items():
        if (found := EXPERT.fullmatch(name)) is not None:
            lists.setdefault(found[1], {}).setdefault(int(found[2]), {})[found[3]] = tensor.shape
    problems: dict[str, list[str]] = {}
    for path, experts in lists.items():
        [(usual, _)] = Counter(frozenset(each.items()) for each in experts.values()).most_common(1)
        shapes = dict(usual)
        if all(experts.get(i) == shapes for i in range(len(experts))):
            continue
        count = num_experts or max(experts) + 1
        asked = {f"{path}.{i}.{name}": shape for i in range(count) for name, shape in shapes.items()}
        there = {f"{path}.{i}.{name}": shape for i, each in experts.items() for name, shape in each.items()}
        both = asked.keys() & there.keys()
        shapes_differ = [f"{name} ({list(there[name])}, not {list(asked[name])})" for name in both if asked[name] != there[name]]
        differing = {MISSING: asked.keys() - there.keys(), UNEXPECTED: there.keys() - asked.keys(), MISSHAPEN: shapes_differ}
        for what, names in differing.items():
            if names:
                problems.setdefault(what, []).extend(names)
    return problems
