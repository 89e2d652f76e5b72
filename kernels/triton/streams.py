"""Streams of a CUDA device that nobody else uses, as long as their owners live."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from threading import RLock
from weakref import WeakSet

import torch

POOL_STREAMS = 32
"""Streams that PyTorch creates per device, and lends in turn."""

WHOLE_DEVICE = RLock()
"""Held by the thread that captures a graph, and by one that waits for all that a device does, which would end the capture, or has
PyTorch return memory, which it does not meanwhile."""


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class StreamOwner:
    """What keeps a stream of a device for itself, as long as it lives.

    It is what weak references are to: those to a stream of PyTorch 2.11 outlive it, and end the interpreter with a crash.
    """

    stream: torch.cuda.Stream


_owners: WeakSet[StreamOwner] = WeakSet()
"""Those of this process: PyTorch would lend their streams again."""


def own_stream() -> StreamOwner:
    """Take a stream of the current device that has no other owner.

    Raises:
        RuntimeError: all streams of the device have one.
    """
    stream = _unowned_stream()
    if stream is None:
        gc.collect()  # a user's reference cycle keeps an engine that is done with, and its streams
        stream = _unowned_stream()
    if stream is None:
        raise RuntimeError(f"{POOL_STREAMS} models or swap spaces have streams of one device: no stream is left for another one")
    owner = StreamOwner(stream)
    _owners.add(owner)
    return owner


def _unowned_stream() -> torch.cuda.Stream | None:
    owned = [torch.cuda.graph.default_capture_stream, *(owner.stream for owner in _owners)]  # the first is everybody's
    return next((stream for stream in (torch.cuda.Stream() for _ in range(POOL_STREAMS)) if stream not in owned), None)
