"""The tensors of a checkpoint in their files, where they are read in place: none is in memory for longer than it is used."""

from __future__ import annotations

import json
import math
import mmap
import weakref
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import EllipsisType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from titan.core.checks import shown
from titan.core.dtypes import dtype_name
from titan.models.files import (
    CODES_NEED,
    CONFIG,
    CONFIG_FILES,
    SINGLE_WEIGHT_FILE,
    WEIGHT_INDEX,
    ModelFiles,
    no_model,
    one_line,
    some,
)

CHOSEN_WEIGHTS = "transformers_weights"
"""Entry of a config: the file of the weights, or an index of several, if they are not those of the usual names."""
WEIGHT_DTYPES = ("F32", "BF16", "F16")
"""Dtypes of weights that are not quantised, by their names in safetensors."""
LFS_POINTER = b"version https://git-lfs"
"""Beginning of a file that stands for a large one in a clone that was made without Git LFS."""
MAX_COPIED_BYTES = 2**16
"""Size of the largest matrix that is copied at once, as are all vectors: most of these are not packed."""
NARROW_DTYPES = (torch.bfloat16, torch.float16)
"""Dtypes whose numbers float32 holds as they are."""
STORED_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Dtypes of tensors that are loaded without a quantiser, by their names in safetensors."""

MISSING, UNEXPECTED, MISSHAPEN = "missing", "unexpected", "of another shape"
"""What may be wrong with a tensor."""

Shape = tuple[int, ...]


def weight_files(files: ModelFiles) -> dict[str, set[str]]:
    """Return the weight files that are loaded, as in transformers: one that the config names, the usual one, or those of an index.

    Returns:
        By the names of the files, the weights that the index has in each; files are in the order in which transformers reads them.

    Raises:
        ValueError: the entry of the config, or the index, is damaged.
    """
    chosen = files.read_json(CONFIG).get(CHOSEN_WEIGHTS)
    if chosen is None:
        is_indexed = (files.fetch(*CONFIG_FILES) / WEIGHT_INDEX).is_file() and SINGLE_WEIGHT_FILE not in files.names()
        chosen = WEIGHT_INDEX if is_indexed else SINGLE_WEIGHT_FILE
    elif not _is_name(chosen, (".safetensors", ".safetensors.index.json")):
        raise ValueError(
            f"model {files.name!r} has a {CONFIG} with {CHOSEN_WEIGHTS}={shown(chosen)}, which is not allowed: it must be the "
            "name of a .safetensors or .safetensors.index.json file beside it"
        )
    if chosen.endswith(".safetensors"):
        return {chosen: set()}
    weight_map = files.read_json(chosen).get("weight_map")
    place = f"model {files.name!r} has a {chosen} with weight_map"
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{place}={shown(weight_map)}, which is not allowed: it must be an object of weights and their files")
    indexed = dict[str, set[str]]()
    for key, file in weight_map.items():
        if not _is_name(file, (".safetensors",)):
            raise ValueError(
                f"{place}[{key!r}]={file!r}, which is not allowed: it must be the name of a .safetensors file beside it"
            )
        indexed.setdefault(file, set()).add(key)
    return dict(sorted(indexed.items()))


def _is_name(found: object, suffixes: tuple[str, ...]) -> bool:
    """Whether an entry is the name of a file, with one of some suffixes, and no path to it."""
    return isinstance(found, str) and Path(found).name == found and found.endswith(suffixes)


class MappedFile:
    """A sound file whose bytes are mapped; PyTorch needs them to be writable, but nobody writes to them."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self.header_size = 8 + int.from_bytes(self._bytes[:8], "little")
        self.header: dict[str, Any] = json.loads(self._bytes[8 : self.header_size])
        self._address = np.frombuffer(self._bytes, np.uint8).ctypes.data

    def __len__(self) -> int:
        return len(self._bytes)

    def read(self, first: int, num_bytes: int) -> Tensor:
        """Return bytes in place: uint8 [num_bytes]; their pages leave the memory with the tensor, and not with the file."""
        array = np.frombuffer(self._bytes, np.uint8, num_bytes, first)
        start, end = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE, (first + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if start < end and hasattr(mmap, "MADV_DONTNEED"):
            weakref.finalize(array, self._bytes.madvise, mmap.MADV_DONTNEED, start, end - start).atexit = False
        return torch.from_numpy(array)

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor is in the file."""
        return 0 <= tensor.data_ptr() - self._address < len(self)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a checkpoint, with what transformers' loading asks of safetensors' slices."""

    name: str
    shape: tuple[int, ...]
    kind: str  # its dtype, as safetensors names it
    first: int  # byte, in the file
    num_bytes: int
    file: MappedFile = field(repr=False)
    run_dtype: torch.dtype | None = None  # of a model of transformers, see `to`

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that its numbers are stored in; it must be one of `STORED_DTYPES`."""
        return STORED_DTYPES[self.kind]

    def read(self, dtype: torch.dtype, rows: slice = slice(None)) -> Tensor:
        """Return some rows in place, after a look at their numbers.

        Raises:
            ValueError: numbers of them are not finite in the dtype.
        """
        found = self._mapped(rows)
        if self.dtype.is_floating_point and dtype.is_floating_point and found.numel():
            low, high = (each.item() for each in found.aminmax())  # compared as tensors, limits would be rounded to their dtype
            if not (low >= torch.finfo(dtype).min and high <= torch.finfo(dtype).max):  # a NaN fails as well
                raise not_finite(self.name, dtype)
        return found

    def equals(self, other: StoredTensor) -> bool:
        """Whether another tensor is the same, bit by bit."""
        is_alike = (self.kind, self.shape) == (other.kind, other.shape)
        return is_alike and torch.equal(*(each.file.read(each.first, each.num_bytes) for each in (self, other)))

    def __getitem__(self, _all: EllipsisType) -> StoredTensor:
        return self

    def to(self, device: Any, dtype: torch.dtype) -> Tensor:
        """Return the tensor; of a model that runs in float32, those of 16 bits are to be widened when they are used.

        Args:
            device: of the result.
            dtype: of the result, except for those.

        Raises:
            ValueError: as `read`, or integers, which would count as they are.
        """
        if dtype.is_floating_point and not self.dtype.is_floating_point:
            raise ValueError(f"weight {self.name!r} has dtype {dtype_name(self.dtype)}: {CODES_NEED}")
        self.read(dtype)
        is_kept = self.run_dtype == dtype == torch.float32 and self.dtype in NARROW_DTYPES
        found = self._mapped().to(device, self.dtype if is_kept else dtype)
        return found.clone() if found.nbytes <= MAX_COPIED_BYTES or found.ndim == 1 else found

    def _mapped(self, rows: slice = slice(None)) -> Tensor:
        length, *others = self.shape or (1,)
        start, end, _ = rows.indices(length)
        num_bytes = self.dtype.itemsize * math.prod(others)  # of a row
        numbers = self.file.read(self.first + start * num_bytes, (end - start) * num_bytes).view(self.dtype)
        return numbers.view(end - start, *others) if self.shape else numbers[0]


def not_finite(name: str, dtype: torch.dtype) -> ValueError:
    """Return what is wrong with a weight that has numbers beyond those of a dtype."""
    return ValueError(f"weight {name!r} has numbers that are not finite in {dtype_name(dtype)}: NaN and infinities are not allowed")


def find_tensors(files: ModelFiles) -> dict[str, StoredTensor]:
    """Read the headers of all weight files, downloading them if need be; return the tensors by name.

    Of a weight in several files, transformers takes the last, whatever the index says: the index must name it, or all be the same.

    Raises:
        ValueError: a file is missing or damaged, or a weight has other numbers in the last file than in one before it, and the
            index names another file for it.
    """
    from safetensors import SafetensorError, safe_open

    name, indexed = files.name, weight_files(files)
    folder = files.fetch(*indexed)
    tensors, differing = dict[str, StoredTensor](), dict[str, str]()
    for path in (folder / each for each in indexed):
        if not path.is_file():
            found = [each for each in files.names() if each.endswith((".bin", ".safetensors", ".pt", ".pth"))]
            way = f"; transformers writes them: AutoModelForCausalLM.from_pretrained({name!r}).save_pretrained(...)"
            advice = way if any(each.startswith("pytorch_model") for each in found) else ""
            raise ValueError(
                no_model(files)
                or f"model {name!r} has no weight file {path.name}: weights must be in {SINGLE_WEIGHT_FILE} "
                f"or in the files of {WEIGHT_INDEX}, unless {CONFIG} has {CHOSEN_WEIGHTS} (found {some(found)}){advice}"
            )
        try:
            with path.open("rb") as content:
                if content.read(len(LFS_POINTER)) == LFS_POINTER:
                    raise OSError("it is a pointer of Git LFS, and `git lfs pull` gets the file")
            with safe_open(path, framework="pt"):  # which checks the header, and the size
                file = MappedFile(path)
        except (SafetensorError, OSError) as error:
            raise ValueError(f"model {name!r} has a damaged weight file {path.name}: {one_line(error)}") from error
        for key, entry in file.header.items():
            if key != "__metadata__":
                start, end = entry["data_offsets"]
                tensor = StoredTensor(key, tuple(entry["shape"]), entry["dtype"], file.header_size + start, end - start, file)
                if key in indexed[path.name]:
                    differing.pop(key, None)
                elif key in tensors and not tensor.equals(tensors[key]):
                    differing[key] = path.name
                tensors[key] = tensor
    for key, file_name in differing.items():
        raise ValueError(
            f"model {name!r} has the weight {key!r} in several files, with other numbers in {file_name}: allowed are the same in "
            f"all, or that the index names the last file"
        )
    return tensors


def weights_dtype(files: ModelFiles) -> torch.dtype:
    """Return the dtype of most numbers in all weight files, downloading them if need be; quantised ones do not count.

    Raises:
        ValueError: a file is missing or damaged.
    """
    sizes = dict.fromkeys(WEIGHT_DTYPES, 0)
    for tensor in find_tensors(files).values():
        if tensor.kind in sizes:
            sizes[tensor.kind] += math.prod(tensor.shape)
    return STORED_DTYPES[max(sizes, key=sizes.__getitem__)]


def copy_mapped(model: nn.Module, tensors: Mapping[str, StoredTensor]) -> None:
    """Copy those weights of a model that are still in their files, which may be changed while the model runs."""
    files = {each.file for each in tensors.values()}
    for weight in model.parameters():
        if any(file.holds(weight) for file in files):
            weight.data = weight.detach().clone()


def misfits(found: Mapping[str, Shape], asked: Mapping[str, Shape]) -> dict[str, list[str]]:
    """Return the names of tensors that are not those asked for, given the shapes of all, by what is wrong."""
    both = found.keys() & asked.keys()
    shapes = [f"{name} ({list(found[name])}, not {list(asked[name])})" for name in both if found[name] != asked[name]]
    return {MISSING: [*asked.keys() - found.keys()], UNEXPECTED: [*found.keys() - asked.keys()], MISSHAPEN: shapes}


def refuse_misfits(problems: Mapping[str, Collection[str]], name: str, advice: str = "") -> None:
    """Refuse weights of which some are wrong, as `misfits` has them.

    Raises:
        ValueError: there are problems.
    """
    if any(problems.values()):
        found = "; ".join(f"{what} {some(sorted(problems.get(what, ())))}" for what in (MISSING, UNEXPECTED, MISSHAPEN))
        raise ValueError(f"the weights do not fit {name}: {found}{advice}")


def check_dtypes(tensors: Mapping[str, StoredTensor], allowed: Collection[str], advice: str = "") -> None:
    """Refuse dtypes, as safetensors names them, other than those that are allowed.

    Raises:
        ValueError: names the tensor; ends with the advice, if it has floats, and not those of 8 bits.
    """
    for each in tensors.values():
        if each.kind not in allowed:
            end = advice if each.kind == "F64" else f"; {CODES_NEED}"
            raise ValueError(
                f"weight {each.name!r} has dtype {each.kind}, which is not supported: it must be one of {', '.join(allowed)}{end}"
            )
