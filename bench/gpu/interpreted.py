"""The CUDA path of an engine on a CPU: Triton's kernels run in its interpreter, and a pass is replayed by running it again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from titan.kernels.torch.backend import TorchBackend
from titan.kernels.torch.cache import TorchCache
from titan.kernels.triton.backend import TritonBackend
from titan.kernels.triton.cuda_graphs import Capture, Replay
from titan.kernels.triton.upload import upload

CPU = torch.device("cpu")


def eager_capture() -> Capture:
    """A capture keeps the function, as a graph keeps its launches: a replay finds new inputs only where the old ones lay.

    As while a graph is captured, nothing is computed; later replays write to what the first one finds.
    """

    def capture(function: Callable[[], Tensor]) -> Replay:
        output = torch.empty(0)

        def replay() -> None:
            found = function()
            if output.numel():
                output.copy_(found)
            else:
                output.data = found.clone()

        return Replay(replay, output)

    return capture


def capture_in_name(function: Callable[[], Tensor]) -> Replay:
    """Run the host's part of passes once, as the capture of a graph does; a replay has none."""
    return Replay(lambda: None, function())


class InterpretedBackend(TritonBackend):
    """The back end of a CUDA device, on the CPU: PyTorch's does what asks the device itself."""

    def __init__(self, capture: Callable[[], Capture] = eager_capture, device: torch.device = CPU) -> None:
        super().__init__(device, capture)
        self._host = TorchBackend(device)
        self.cache = TorchCache(partial(upload, device=device))

    def active(self) -> AbstractContextManager[None]:
        return self._host.active()

    def free_memory(self) -> int:
        return self._host.free_memory()

    def utilization(self) -> float | None:
        return self._host.utilization()

    def mark(self) -> Any:
        return self._host.mark()

    def seconds_between(self, marks: Sequence[Any]) -> list[float]:
        return self._host.seconds_between(marks)
