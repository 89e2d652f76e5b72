"""Copies of KV blocks between a CUDA device and pinned memory of the host, on a stream of their own; see `CacheOps`."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from weakref import finalize

import numpy as np
import torch
from torch import Tensor

from titan.core.arrays import Ints
from titan.core.kv_tensor import KVTensor
from titan.core.trees import Upload
from titan.kernels.torch.cache import TorchCache, as_rows, layer_rows, runs
from titan.kernels.triton.streams import WHOLE_DEVICE, StreamOwner, own_stream

STAGED_BYTES = 64 * 2**20
"""Bytes of a piece of the blocks on their way in or out, of which the device has a copy meanwhile."""

MAX_PIECES_OUT = 4
"""Pieces of one call on their way out at a time; passes wait for what goes beyond."""


class CudaCache(TorchCache):
    """Cache operations of a CUDA device. Copies keep their order among themselves and run beside passes.

    Blocks on their way out are gathered piece by piece before anything else is computed, so that they may be overwritten; the
    transfer of the last `MAX_PIECES_OUT` pieces of a call is beside the passes. Blocks on their way in are waited for when
    `await_copies` says so, or if they go out again.
    """

    def __init__(self, upload: Upload, device: torch.device) -> None:
        super().__init__(upload)
        self._device = device
        self._arrival: torch.cuda.Event | None = None  # of the blocks copied in last, until somebody waits
        self._arriving = set[int]()  # these blocks, of any cache

    @cached_property
    def _owner(self) -> StreamOwner:
        with torch.cuda.device(self._device):
            return own_stream()  # when something is copied

    @property
    def _stream(self) -> torch.cuda.Stream:
        return self._owner.stream

    def host_blocks(self, kv: KVTensor, num_blocks: int) -> list[Tensor]:
        return [page_locked(each, self._device) for each in super().host_blocks(kv, num_blocks)]

    def copy_out(self, kv: KVTensor, host: Sequence[Tensor], sources: Ints, targets: Ints) -> None:
        if not self._arriving.isdisjoint(sources.tolist()):
            self.await_copies()
        [ids] = self._upload([sources])
        passes, sent = torch.cuda.current_stream(self._device), deque[tuple[Tensor, torch.cuda.Event]]()
        try:
            for group, blocks in zip(kv.groups, host, strict=True):
                for piece in _pieces(blocks, len(targets)):
                    if len(sent) == MAX_PIECES_OUT:
                        passes.wait_event(sent[0][1])
                        sent.popleft()  # after that wait, the next piece may take its memory
                    gathered = group.transpose(0, 1).index_select(0, ids[piece])
                    with self._after_passes():
                        for here, away in runs(np.arange(len(gathered)), targets[piece]):
                            blocks[away].copy_(gathered[here], non_blocking=True)
                        sent.append((gathered, self._stream.record_event()))
        finally:  # without memory for the next piece, those before it are on their way
            for gathered, _ in sent:
                gathered.record_stream(self._stream)

    def copy_in(self, kv: KVTensor, host: Sequence[Tensor], sources: Ints, targets: Ints) -> None:
        with self._after_passes():
            try:
                for group, blocks in zip(kv.groups, host, strict=True):
                    for piece in _pieces(blocks, len(targets)):
                        [rows] = self._upload([layer_rows(group, targets[piece])])
                        arrived = group.new_empty(len(targets[piece]), *blocks.shape[1:])
                        for away, here in runs(sources[piece], np.arange(len(arrived))):
                            arrived[here].copy_(blocks[away], non_blocking=True)
                        as_rows(group)[rows.view(len(group), -1)] = arrived.transpose(0, 1)
            finally:  # without memory for the next piece, those before it are on their way
                self._arrival = self._stream.record_event()
                self._arriving.update(targets.tolist())

    def await_copies(self) -> None:
        if self._arrival is not None:
            torch.cuda.current_stream(self._device).wait_event(self._arrival)
            self._arrival = None
            self._arriving.clear()

    def _after_passes(self) -> torch.cuda.StreamContext:
        """Return the copies' stream as a context, after all that was launched so far."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return torch.cuda.stream(self._stream)


def _pieces(blocks: Tensor, num_blocks: int) -> Iterator[slice]:
    """Cut this many blocks of a group into pieces of at most `STAGED_BYTES` each, but of one block at least."""
    most = max(1, STAGED_BYTES // blocks[0].nbytes)
    return (slice(first, min(first + most, num_blocks)) for first in range(0, num_blocks, most))


def page_locked(tensor: Tensor, device: torch.device) -> Tensor:
    """Lock the pages of a tensor on the host as long as it lives, so that a device copies from and to them beside its passes.

    PyTorch's own memory of this kind takes up to twice as much: its sizes are powers of two.

    Raises:
        MemoryError: the system does not permit to lock as much.
    """
    if not tensor.nbytes:
        return tensor
    address = tensor.data_ptr()
    error = int(torch.cuda.cudart().cudaHostRegister(address, tensor.nbytes, 0))
    if error:
        with suppress(RuntimeError):
            torch.ones(1, device=device)  # else PyTorch would find the error after the next kernel, and blame that
        raise MemoryError(f"{tensor.nbytes} bytes of the host cannot be page-locked: CUDA error {error}")
    finalize(tensor, _unlock_pages, address, device).atexit = False
    return tensor


def _unlock_pages(address: int, device: torch.device) -> None:
    with WHOLE_DEVICE:
        torch.cuda.synchronize(device)  # copies may be on their way
    torch.cuda.cudart().cudaHostUnregister(address)
