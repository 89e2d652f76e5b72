"""Rows of logits with options, as the kernels take them, as `titan.sample.distributions` takes them, and as the slow twin does."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from titan.bench.gpu.acceptance_reference import reference_probs
from titan.kernels.triton.tools import INTERPRETED
from titan.sample.distributions import SamplingRows

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")


class RowOptions:
    """Temperature, top-k, top-p and min-p of R rows, with seeds and positions that differ."""

    def __init__(self, options: Sequence[tuple[float, int, float, float]]) -> None:
        columns = list(zip(*options, strict=True))
        self.temperature, self.top_p, self.min_p = (np.array(columns[i], np.float32) for i in (0, 2, 3))
        self.top_k = np.array(columns[1], np.int64)
        self.seeds = np.arange(len(options), dtype=np.uint64) * np.uint64(2**60 + 12345)
        self.positions = np.arange(len(options)) * 3 + 7

    def __len__(self) -> int:
        return len(self.seeds)

    def on_host(self) -> SamplingRows:
        return SamplingRows(self.temperature, self.top_k, self.top_p, self.min_p, self.seeds, self.positions, [])

    def for_distribution(self) -> dict[str, Tensor]:
        return {
            "temperature": torch.from_numpy(self.temperature).to(DEVICE),
            "top_k": torch.from_numpy(self.top_k).to(DEVICE, torch.int32),
            "top_p": torch.from_numpy(self.top_p).to(DEVICE),
            "min_p": torch.from_numpy(self.min_p).to(DEVICE),
        }

    def for_draw(self) -> dict[str, Tensor]:
        seeds = torch.from_numpy(self.seeds.view(np.int64))
        return {"seeds": seeds.to(DEVICE), "positions": torch.from_numpy(self.positions).to(DEVICE)}

    def reference_probs(self, logits: Tensor) -> Tensor:
        """float64 [R, vocab] of the slow twin."""
        columns = (self.temperature.tolist(), self.top_k.tolist(), self.top_p.tolist(), self.min_p.tolist())
        return torch.stack(
            [
                reference_probs(row, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
                for row, temperature, top_k, top_p, min_p in zip(logits.cpu(), *columns, strict=True)
            ]
        )
