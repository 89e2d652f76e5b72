"""Distributions in Triton kernels; see `titan.kernels.interfaces.SamplingOps`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from titan.core.arrays import Ints
from titan.core.random import Purpose
from titan.core.sampling_rows import SamplingRows
from titan.kernels.torch.sampling import TorchSampling
from titan.kernels.triton.row_distribution import RowDistributions, normalized_probs, row_bytes, row_distributions, write_probs
from titan.kernels.triton.sample_rows import sample_rows
from titan.kernels.triton.top_tokens import row_argmax, top_candidates


class TritonSampling(TorchSampling):
    """Computes distributions, the most likely tokens, and single children; several of a node are sampled by PyTorch."""

    def argmax(self, logits: Tensor) -> Tensor:
        return row_argmax(logits)

    def top_candidates(self, logits: Tensor, count: int, temperatures: Tensor) -> tuple[Tensor, Tensor]:
        return top_candidates(logits, count, temperatures)

    def probs(self, logits: Tensor, rows: SamplingRows) -> Tensor:
        return normalized_probs(self.distributions(logits, rows)[0])

    def sample_children(
        self, logits: Tensor, rows: SamplingRows, num_children: Ints, places: Tensor, probs: Tensor, children: Tensor
    ) -> None:
        if num_children.max() > 1:
            super().sample_children(logits, rows, num_children, places, probs, children)
            return
        random = rows.options["seed"].view(np.int64), rows.options["position"]
        distributions, [seeds, positions] = self.distributions(logits, rows, *random)
        write_probs(distributions, places * row_bytes(probs.shape[1]) + probs.data_ptr())
        children[places, 0] = sample_rows(distributions, seeds, positions, Purpose.DRAFT)

    def distributions(self, logits: Tensor, rows: SamplingRows, *others: NDArray[Any]) -> tuple[RowDistributions, list[Tensor]]:
        """Return the distributions of `probs` before they are written out, and other arrays that take part in the one upload."""
        options = distribution_options(rows, logits.shape[1])
        uploaded = self._upload([*options.values(), *others])
        return row_distributions(logits, **dict(zip(options, uploaded, strict=False))), uploaded[len(options) :]


def distribution_options(rows: SamplingRows, vocab_size: int) -> dict[str, NDArray[Any]]:
    """Return the options of rows as `row_distributions` takes them, by name."""
    options = {name: rows.options[name] for name in ("temperature", "top_p", "min_p")}
    return options | {"top_k": np.minimum(rows.options["top_k"], vocab_size).astype(np.int32)}
