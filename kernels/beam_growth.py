"""Growth of draft trees as beams: see `BeamGrowth`.

Legend: n requests of a growth, V vocabulary of the trees, W beam width, k children considered per node, c candidates of a depth.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from titan.core.arrays import Ints
from titan.core.growth import BeamSpec, Feed, Worth
from titan.core.limits import MAX_NODES
from titan.core.trees import Upload
from titan.kernels.interfaces import Backend, Candidates


class BeamGrowth:
    """Expands, at each depth, the nodes with the greatest cumulative probability: a `titan.kernels.growth.Growth`.

    Args:
        feeds: n feeds with beam specs of equal width and number of children, either all with a worth or none.
        logits: [n, V], of their roots.
        backend: the one that the draft runs on.
    """

    def __init__(self, feeds: Sequence[Feed], logits: Tensor, backend: Backend) -> None:
        specs = [feed.spec for feed in feeds if isinstance(feed.spec, BeamSpec)]
        self.rows = np.array([feed.row for feed in feeds])
        self._specs = specs
        self._backend = backend
        self._max_depths = np.array([spec.depth for spec in specs])
        self._width = specs[0].width
        self._num_children = specs[0].num_children
        # per depth, for all requests: token_ids, scores, parent_slots and slots of `Candidates`
        self._levels: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        self._beam: Tensor  # int64 [n, W], indices of the last level's candidates that are fed
        self._beam_scores: Tensor  # float32 [n, W]; -inf where feeding does not pay: their children are no candidates
        self._bits: Tensor  # int64 [n, W], their ancestor bits
        # [], profit of feeding the beam, as a multiple of the price of a pass; None: infinite
        self.gain: Tensor | None = None
        self._worths = BeamWorths.of([spec.worth for spec in specs if spec.worth is not None], backend.upload)
        depths = range(1, int(self._max_depths.max()) + 1)
        self._temperatures, *columns = backend.upload(
            [
                np.array([spec.temperature for spec in specs], np.float32),
                *(np.flatnonzero(self._max_depths > depth) for depth in depths),
                *((self._max_depths <= depth)[:, None] for depth in depths),
            ]
        )
        self._going_on = columns[: len(depths)]  # per depth, from 1 on: indices of the requests that feed nodes of it
        self._is_last = columns[len(depths) :]  # per depth: bool [n, 1], whether a request feeds none of them
        token_ids, scores = backend.sampling.top_candidates(logits, self._num_children, self._temperatures)
        self.first_scores = scores[:, 0]  # float32 [n]
        self._add_level(token_ids, scores, torch.full_like(token_ids, -1), torch.zeros_like(token_ids), depth=1)

    @property
    def fed_slots(self) -> list[list[Ints]]:
        """Slots where nodes are fed: see `titan.kernels.growth.Growth`."""
        return [list(np.arange((depth - 1) * self._width).reshape(-1, self._width)) for depth in self._max_depths.tolist()]

    def frontier(self, depth: int) -> tuple[Tensor, Tensor]:
        index = self._going_on[depth - 1]
        token_ids = self._levels[-1][0]
        return token_ids.gather(1, self._beam)[index].flatten(), self._bits[index].flatten()

    def extend(self, depth: int, logits: Tensor) -> None:
        index = self._going_on[depth - 1]
        n, width, k = len(self._specs), self._width, self._num_children
        temperatures = self._temperatures[index].repeat_interleave(width)
        token_ids, logprobs = self._backend.sampling.top_candidates(logits, k, temperatures)
        scores = logprobs.new_full((n, width * k), float("-inf"))
        parent_scores = self._beam_scores[index]
        scores[index] = (logprobs.reshape(-1, width, k) + parent_scores[:, :, None]).flatten(1)
        all_tokens = token_ids.new_zeros(n, width * k)
        all_tokens[index] = token_ids.reshape(-1, width * k)
        parent_slots = torch.arange((depth - 1) * width, depth * width, device=logits.device).repeat_interleave(k).expand(n, -1)
        self._add_level(all_tokens, scores, parent_slots, self._bits.repeat_interleave(k, dim=1), depth=depth + 1)

    def candidates(self) -> Candidates:
        """Return the candidates of all depths."""
        token_ids, scores, parent_slots, slots = (torch.cat(column, 1) for column in zip(*self._levels, strict=True))
        slots[:, -self._levels[-1][0].shape[1] :] = -1  # the last level was not fed
        return Candidates(
            rows=self.rows,
            num_nodes=np.array([min(spec.num_nodes, token_ids.shape[1]) for spec in self._specs]),
            is_chain=np.zeros(len(self._specs), np.bool_),
            has_scores=True,
            token_ids=token_ids,
            scores=scores,
            parent_slots=parent_slots,
            slots=slots,
        )

    def _add_level(self, token_ids: Tensor, scores: Tensor, parent_slots: Tensor, parent_bits: Tensor, depth: int) -> None:
        """Add the candidates of a depth, [n, c] each, and choose those that are fed."""
        is_last = self._is_last[depth - 1]
        if self._worths is not None:
            scores = self._worths.cut(scores, depth)
        self._beam = scores.topk(self._width, dim=-1).indices
        self._beam_scores = scores.gather(1, self._beam)
        places = torch.arange((depth - 1) * self._width, depth * self._width, device=scores.device).expand_as(self._beam)
        # slots of the deepest level may exceed the bits of an int64: it is never fed, so that no node needs them
        self._bits = parent_bits.gather(1, self._beam) | (1 << places.clamp(max=MAX_NODES - 1))
        fed = places.masked_fill(is_last, -1)
        if self._worths is not None:
            profits = self._worths.profits(self._beam_scores, depth).masked_fill(is_last, 0)
            self.gain = (profits / self._worths.pass_price).sum()
            fed = fed.where(profits > 0, -1)
            self._beam_scores = self._beam_scores.where(profits > 0, float("-inf"))
        self._levels.append((token_ids, scores, parent_slots, torch.full_like(token_ids, -1).scatter(1, self._beam, fed)))


class BeamWorths(NamedTuple):
    """The fields of `titan.core.growth.Worth` for n beams: float32 [n, 1] each."""

    agreement: Tensor
    acceptance: Tensor
    node_price: Tensor
    row_price: Tensor
    pass_price: Tensor

    @classmethod
    def of(cls, worths: Sequence[Worth], upload: Upload) -> BeamWorths | None:
        """Upload the worths of n beams; return ``None`` if there are none."""
        columns = (np.array([[getattr(worth, name)] for worth in worths], np.float32) for name in cls._fields)
        return cls(*upload([*columns])) if worths else None

    def cut(self, scores: Tensor, depth: int) -> Tensor:
        """Set the scores of candidates at a depth to -inf if they are not worth verifying: [n, c]."""
        return scores.where(self._values(scores, depth) >= self.node_price, float("-inf"))

    def profits(self, scores: Tensor, depth: int) -> Tensor:
        """Compute the profits of feeding candidates at a depth, 0 if that does not pay: [n, c]."""
        profits = self._values(scores, depth) * self.acceptance - (self.node_price + self.row_price)
        return profits.where(profits > 0, 0)

    def _values(self, scores: Tensor, depth: int) -> Tensor:
        return self.agreement**depth * scores.exp()
