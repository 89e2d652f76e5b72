"""The CUDA path of an engine: on a CUDA device where there is one, else on the CPU, in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from titan.bench.gpu.interpreted import InterpretedBackend, eager_capture
from titan.kernels.triton.backend import TritonBackend
from titan.kernels.triton.cuda_graphs import Capture, cuda_graph_capture
from titan.kernels.triton.tools import INTERPRETED

DEVICE = torch.device("cpu") if INTERPRETED else torch.device("cuda", 0)

ON_CUDA = [pytest.mark.cuda, pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="no CUDA device")]
"""Marks of what needs a CUDA device: all such tests are run by ``pytest -m cuda``."""

make_capture = eager_capture if INTERPRETED else cuda_graph_capture


def triton_backend(capture: Callable[[], Capture] = make_capture) -> TritonBackend:
    """The back end of a CUDA device, on `DEVICE`."""
    return InterpretedBackend(capture) if INTERPRETED else TritonBackend(DEVICE, capture)
