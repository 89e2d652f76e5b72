"""The CUDA path of an engine: on a CUDA device where there is one, else on the CPU.

There the Triton kernels run in the interpreter, and a pass is replayed by running it again.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from titan.kernels.torch.backend import TorchBackend
from titan.kernels.triton.backend import TritonBackend
from titan.kernels.triton.cuda_graphs import Capture, Replay, cuda_graph_capture
from titan.kernels.triton.tools import INTERPRETED

DEVICE = torch.device("cpu") if INTERPRETED else torch.device("cuda", 0)

ON_CUDA = [pytest.mark.cuda, pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="no CUDA device")]
"""Marks of what needs a CUDA device: all such tests are run by ``pytest -m cuda``."""


def eager_capture() -> Capture:
    """A capture keeps the function, as a graph keeps its launches: a replay finds new inputs only where the old ones lay."""

    def capture(function: Callable[[], Tensor]) -> Replay:
        output = torch.full_like(function(), torch.nan)

        def replay() -> None:
            output.copy_(function())

        return Replay(replay, output)

    return capture


make_capture = eager_capture if INTERPRETED else cuda_graph_capture


def triton_backend() -> TritonBackend:
    """The back end of a CUDA device, on `DEVICE`."""
    backend = TritonBackend(DEVICE, make_capture)
    if INTERPRETED:
        backend.free_memory = TorchBackend(DEVICE).free_memory  # type: ignore[method-assign]
    return backend
