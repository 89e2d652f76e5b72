"""The compiled C++ of this folder as Python calls it."""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from titan.kernels.cpu.library import LoadedLibrary
from titan.kernels.cpu.threads import available_cores
from titan.kernels.cpu.weight_memory import WeightMemory
from titan.kernels.torch.backend import torch_threads

COMPILED_DTYPES = (torch.float32, torch.bfloat16)
"""Dtypes that the library's functions exist for."""

POINTER, INT, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
"""Types of the library's arguments and of the fields of its structs."""


class CompiledKernels:
    """The functions of a library, and threads that they share.

    Args:
        loaded: the library.
        num_threads: ``None``: as many as there are physical cores for this process, and at most as many as PyTorch has.
    """

    def __init__(self, loaded: LoadedLibrary, num_threads: int | None = None) -> None:
        assert loaded.library is not None, loaded.description
        self.description, self.path = loaded.description, loaded.path
        self.num_threads = num_threads or min(available_cores(), torch_threads())
        self._find = loaded.library.find_function
        self._find.restype, self._find.argtypes = POINTER, [ctypes.c_char_p, INT]
        self.team: int | None = self.plain_function("make_team", None, INT, result=POINTER)(self.num_threads)
        if self.team is None:
            raise ValueError(f"num_threads={self.num_threads} is not possible: the system does not allow so many threads")
        self.has_codes = bool(self._find(b"make_codes_12", False))  # whether products read codes
        self.weight_memory = WeightMemory()
        # not when Python ends: a thread that does not end with it may be in a pass
        self.finalizer = weakref.finalize(self, self.plain_function("free_team", None, POINTER), self.team)
        self.finalizer.atexit = False

    def function(self, name: str, dtype: torch.dtype | None, *arguments: Any) -> Any:
        """Return the function of a name for tensors of a dtype, if it differs between them; it runs on the threads.

        Args:
            name: in the C++.
            dtype: one of `COMPILED_DTYPES`.
            arguments: their types.
        """
        function = self.plain_function(name, dtype, POINTER, *arguments)
        return lambda *values: function(self.team, *values)  # the threads live as long as it does

    def plain_function(self, name: str, dtype: torch.dtype | None, *arguments: Any, result: Any = None) -> Any:
        """Return, likewise, a function that does not take the threads as its first argument, and may have a result of a type.

        One without a result raises a `MemoryError` if there is too little memory for what it does.
        """
        assert dtype in (None, *COMPILED_DTYPES)
        address = self._find(name.encode(), dtype == torch.bfloat16)
        assert address is not None, name
        function = ctypes.CFUNCTYPE(result or INT, *arguments)(address)
        if result is None:
            function.errcheck = _check_memory
        return function


def _check_memory(was_enough: Any, *_: Any) -> Any:
    if not was_enough:
        raise MemoryError("the host has too little memory for the working memory of the C++")


_NOTHING = ctypes.c_char * 0
_INT64, INT32, BOOL, FLOAT32 = map(np.dtype, (np.int64, np.int32, np.bool_, np.float32))


def address(array: NDArray[Any], dtype: np.dtype[Any] = _INT64) -> int:
    """Return the address of an array's data.

    Raises:
        TypeError: the array is of another dtype than is read, or not contiguous.
    """
    if array.dtype != dtype:
        raise TypeError(f"the compiled C++ reads {dtype}: an array of {array.dtype} is not allowed")
    if array.flags.writeable:  # the faster way
        return ctypes.addressof(_NOTHING.from_buffer(array))  # type: ignore[arg-type]
    if not array.flags.c_contiguous:
        raise TypeError("the compiled C++ reads arrays whose numbers lie side by side: others are not allowed")
    return array.ctypes.data
