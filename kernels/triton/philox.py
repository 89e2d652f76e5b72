"""Counter-based random numbers with the bits of `titan.core.random`."""

from __future__ import annotations

import triton
import triton.language as tl

from titan.core.random import Purpose

SAMPLE = tl.constexpr(Purpose.SAMPLE.value)
ACCEPT = tl.constexpr(Purpose.ACCEPT.value)
RESIDUAL = tl.constexpr(Purpose.RESIDUAL.value)


@triton.jit
def philox_uniform(seed, position, purpose, sibling):
    """Return uniform float64 numbers in (0, 1) by Philox 4x32-10.

    Key = ``seed``, the bits of an int64; counter = (``position``, ``purpose | sibling << 8``, 0, 0). All are scalars or tensors of
    one shape; positions are below 2**32.
    """
    counter = position.to(tl.uint32)
    zero = counter * 0
    stream = zero + (purpose | sibling << 8)
    word0, word1, _, _ = tl.philox(seed, counter, stream, zero, zero)  # uint32 counters: other types select another generator
    bits = (word0.to(tl.uint64) << 20) | (word1 >> 12).to(tl.uint64)
    return (bits.to(tl.float64) + 0.5) * 2.0**-52  # half a step, so that it is never 0 or 1
