"""The CUDA path of an engine: on a CUDA device where there is one, else on the CPU.

There the Triton kernels run in the interpreter, and a pass is replayed by running it again.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from titan.kernels.triton.cuda_graphs import Capture, Replay
from titan.kernels.triton.tools import INTERPRETED

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")


def eager_capture() -> Capture:
    """A capture keeps the function, as a graph keeps its launches: a replay finds new inputs only where the old ones lay."""

    def capture(function: Callable[[], Tensor]) -> Replay:
        output = torch.full_like(function(), torch.nan)

        def replay() -> None:
            output.copy_(function())

        return Replay(replay, output)

    return capture


def take_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on, what is on `DEVICE` is handled as on CUDA."""
    if INTERPRETED:
        monkeypatch.setattr("titan.kernels.backend.takes_triton", lambda device: True)
        monkeypatch.setattr("titan.execute.model_runner.cuda_graph_capture", eager_capture)
