"""Sampling of the next token of each chain within CUDA graphs: options, and where q goes, lie at fixed addresses."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from titan.core.arrays import Ints
from titan.core.random import Purpose
from titan.core.sampling_rows import SamplingRows
from titan.kernels.interfaces import Backend
from titan.kernels.triton.row_distribution import row_bytes, row_distributions, write_probs
from titan.kernels.triton.sample_rows import sample_rows
from titan.kernels.triton.sampling import distribution_options


class ChainSampler:
    """Samples a token of each chain, up to ``num_requests``, and writes q to the memory that each step allocates for it."""

    def __init__(self, backend: Backend, num_requests: int) -> None:
        self._backend = backend
        dtypes = {"temperature": torch.float32, "top_p": torch.float32, "min_p": torch.float32, "top_k": torch.int32}
        self._options = {name: torch.zeros(num_requests, dtype=dtype, device=backend.device) for name, dtype in dtypes.items()}
        self._seeds = torch.zeros(num_requests, dtype=torch.int64, device=backend.device)
        self.addresses = torch.zeros_like(self._seeds)  # of the q that is written next, for each chain; 0: it is not written

    def load(self, sampling: SamplingRows, probs: Tensor, rows: Ints) -> None:
        """Load the options of n chains and addresses of their first q.

        Args:
            sampling: options; at temperature 0, the most likely token is taken.
            probs: float32 [any, vocab], contiguous; written until all tokens are sampled.
            rows: int64 [n], rows of ``probs``; -1: q is not written.
        """
        options, vocab_size = distribution_options(sampling, probs.shape[1]), probs.shape[1]
        addresses = np.where(rows < 0, 0, probs.data_ptr() + rows * row_bytes(vocab_size))
        uploaded = self._backend.upload([*options.values(), sampling.options["seed"].view(np.int64), addresses])
        statics = [*(self._options[name] for name in options), self._seeds, self.addresses]
        for static, values in zip(statics, uploaded, strict=True):
            static[: len(values)].copy_(values)

    def sample(self, logits: Tensor, positions: Tensor) -> Tensor:
        """Sample the tokens of the first n chains: int64 [n], -1 where the largest logit is not finite.

        Args:
            logits: [n, vocab].
            positions: int64 [n], of these tokens.
        """
        n = len(logits)
        distributions = row_distributions(logits, **{name: values[:n] for name, values in self._options.items()})
        write_probs(distributions, self.addresses[:n])
        return sample_rows(distributions, self._seeds[:n], positions, Purpose.DRAFT)
