"""The CUDA path of an engine on a CPU: Triton kernels in the interpreter, and passes that are replayed by running them again."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from titan.cuda_graphs import Capture, Replay


def eager_capture() -> Capture:
    """A capture keeps the function, as a graph keeps its launches: a replay finds new inputs only where the old ones lay."""

    def capture(function: Callable[[], Tensor]) -> Replay:
        output = torch.full_like(function(), torch.nan)

        def replay() -> None:
            output.copy_(function())

        return Replay(replay, output)

    return capture


def take_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on, models that are loaded, and KV and logits, are handled as on CUDA."""
    monkeypatch.setattr("titan.kernels.backend.takes_triton", lambda device: True)
    monkeypatch.setattr("titan.model_runner.cuda_graph_capture", eager_capture)
