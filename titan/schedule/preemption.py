"""The choice between swap and recompute for a request that is preempted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from titan.core.request import Request


@dataclass(slots=True)
class SwapRule:
    """Chooses between swap and recompute by the mode in the options.

    "auto" compares the seconds of copying a request's blocks out and in again with those that its tokens would add to the target's
    passes, chunk by chunk, beside a row that runs anyway. All of its tokens count, although some may still be cached when it
    returns; the draft's passes do not. If passes were not measured, it swaps: the KV of a token is much smaller than the weights
    that a pass reads.
    """

    mode: str
    chunk_size: int  # maximum tokens of a request in a pass
    block_s: float = 0.0  # seconds to copy a block out and in again
    pass_s: Callable[[float, float], float] | None = None  # seconds of a pass of the target by its rows and tokens of context

    def prefers_swap(self, request: Request) -> bool:
        """Whether a running request should be swapped out rather than computed again."""
        if self.mode != "auto" or self.pass_s is None:
            return self.mode != "recompute"
        return len(request.block_ids) * self.block_s <= self._recompute_s(request.num_computed_tokens, self.pass_s)

    def _recompute_s(self, num_tokens: int, pass_s: Callable[[float, float], float]) -> float:
        starts = range(0, num_tokens, self.chunk_size)
        return sum(pass_s(1 + min(self.chunk_size, num_tokens - start), start) - pass_s(1, 0) for start in starts)
