"""Sampling of the next token of each chain within CUDA graphs: options, and where q goes, lie at fixed addresses.

Siblings of these tokens are sampled from q after the last graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from titan.core.arrays import Ints
from titan.core.random import Purpose, philox_uniform
from titan.core.sampling_rows import SamplingRows
from titan.kernels.interfaces import Backend
from titan.kernels.torch.sampling import draw_siblings
from titan.kernels.triton.chain_trees import Chains, probs_rows
from titan.kernels.triton.row_distribution import row_bytes, row_distributions, write_probs
from titan.kernels.triton.sample_rows import sample_rows
from titan.kernels.triton.sampling import distribution_options
from titan.kernels.triton.upload import aligned


class ChainSampler:
    """Samples a token of each chain, up to ``num_requests``, and writes q to the memory that each step allocates for it."""

    def __init__(self, backend: Backend, num_requests: int) -> None:
        self._backend = backend
        width = aligned(num_requests)  # so that each row is aligned
        self._options = torch.zeros(4, width, dtype=torch.int32, device=backend.device)  # the bits of three floats, and top-k
        self._longs = torch.zeros(2, width, dtype=torch.int64, device=backend.device)
        # seeds, and addresses of the q that is written next, for each chain; 0: it is not written
        self._seeds, self.addresses = self._longs.unbind()

    def arrays(self, sampling: SamplingRows, probs: Tensor, rows: Ints) -> list[NDArray[Any]]:
        """Return the options of n chains and addresses of their first q, which `load` takes once they are uploaded.

        Args:
            sampling: options; at temperature 0, the most likely token is taken.
            probs: float32 [any, vocab], contiguous; written until all tokens are sampled.
            rows: int64 [n], rows of ``probs``; -1: q is not written.
        """
        options, vocab_size = distribution_options(sampling, probs.shape[1]), probs.shape[1]
        addresses = np.where(rows < 0, 0, probs.data_ptr() + rows * row_bytes(vocab_size))
        bits = np.stack([options[name].view(np.int32) for name in ("temperature", "top_p", "min_p", "top_k")])
        return [bits, np.stack([sampling.options["seed"].view(np.int64), addresses])]

    def load(self, uploaded: Sequence[Tensor]) -> None:
        """Load the `arrays` of this step's chains."""
        for static, values in zip((self._options, self._longs), uploaded, strict=True):
            static[:, : values.shape[1]].copy_(values)

    def sample(self, logits: Tensor, positions: Tensor) -> Tensor:
        """Sample the tokens of the first n chains: int64 [n], -1 where the largest logit is not finite.

        Args:
            logits: [n, vocab].
            positions: int64 [n], of these tokens.
        """
        n = len(logits)
        *floats, top_k = self._options[:, :n].unbind()
        temperature, top_p, min_p = (each.view(torch.float32) for each in floats)
        distributions = row_distributions(logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        write_probs(distributions, self.addresses[:n])
        return sample_rows(distributions, self._seeds[:n], positions, Purpose.DRAFT)

    def with_siblings(self, chains: Chains, drafted: Tensor, probs: Tensor) -> Tensor:
        """Sample the siblings that plans ask for: int64 [I, k], the children of I roots and nodes that were fed, tree by tree.

        They are -1 where there is none.

        Args:
            chains: of a step; they have plans.
            drafted: int64 [2, n, D, 1], first children, and the bits of their scores.
            probs: the q that these were sampled from, whose rows are those of `probs_rows`.
        """
        assert chains.sampling is not None
        depths, *_, num_children = np.concatenate([plan.inner for plan in chains.plans], 1)
        owners = np.repeat(np.arange(len(chains.plans)), 1 + chains.num_fed)
        parents = np.flatnonzero(num_children > 1)
        chosen, depths_of_parents = owners[parents], depths[parents]
        options = chains.sampling.options[chosen]
        keys = options["seed"][:, None], (options["position"] + depths_of_parents)[:, None]
        firsts, may_end, places, rows, uniform, counts = self._backend.upload(
            [
                owners * (1 + chains.num_fed[0]) + depths,
                chains.is_sampled[owners],  # greedy chains go on with token 0
                parents,
                probs_rows(chains)[chosen, depths_of_parents],
                philox_uniform(*keys, Purpose.DRAFT, sibling=np.arange(1, num_children.max())),
                num_children[parents] - 1,
            ]
        )
        token_ids, bits = drafted.view(2, -1).index_select(1, firsts)
        children = pad(token_ids.masked_fill((bits != 0) & may_end, -1)[:, None], (0, uniform.shape[1]), value=-1)
        rest = probs.index_select(0, rows).scatter_(1, token_ids.index_select(0, places)[:, None], 0.0)
        children[places, 1:] = draw_siblings(rest, uniform, counts)
        return children
