"""Counter-based random numbers: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.

A number depends only on (request seed, absolute position, purpose, sibling), so results do not depend on batch neighbours, batch
order or preemption, nor on speculation if proposals are deterministic.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from titan.core.arrays import Ints

WORD = np.uint64(0xFFFFFFFF)
WORD_BITS = np.uint64(32)


class Purpose(IntEnum):
    """What a random number is for; streams of different purposes are independent."""

    SAMPLE = 0
    CORRUPT = 1
    DRAFT = 2
    ACCEPT = 3
    RESIDUAL = 4


def philox_uniform(
    seeds: NDArray[np.uint64] | int, positions: Ints | int, purpose: Purpose | Ints, *, sibling: int | Ints = 0
) -> NDArray[np.float64]:
    """Generate uniform numbers in (0, 1), one per (seed, position, purpose, sibling), by Philox 4x32-10.

    Key = seed, counter = (position, purpose and sibling, 0, 0).

    Args:
        seeds: broadcast with the other arguments to the shape of the result.
        positions: below 2**32.
        purpose: the stream.
        sibling: which child of a node the number is for.
    """
    streams = np.asarray(purpose, np.int64) | np.asarray(sibling, np.int64) << 8
    keys, *counter = np.broadcast_arrays(*(np.asarray(array).astype(np.uint64) for array in (seeds, positions, streams)))
    counters = np.zeros((4, *keys.shape), np.uint64)
    counters[:2] = np.stack(counter) & WORD
    words = philox(counters, np.stack((keys & WORD, keys >> WORD_BITS)))
    # 52 bits plus half a step: never 0 or 1
    bits = (words[0] << np.uint64(20)) | (words[1] >> np.uint64(12))
    uniform: NDArray[np.float64] = (bits.astype(np.float64) + 0.5) * 2.0**-52
    return uniform


def philox(counters: NDArray[np.uint64], keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Generate random words by Philox 4x32-10, the same for the same counter and key.

    Args:
        counters: [4, ...], below 2**32.
        keys: [2, ...], below 2**32.

    Returns:
        [4, ...], below 2**32.
    """
    c0, c1, c2, c3 = counters
    key0, key1 = keys
    for _ in range(10):
        product0 = c0 * np.uint64(0xD2511F53)
        product1 = c2 * np.uint64(0xCD9E8D57)
        c0, c1 = (product1 >> WORD_BITS) ^ c1 ^ key0, product1 & WORD
        c2, c3 = (product0 >> WORD_BITS) ^ c3 ^ key1, product0 & WORD
        key0 = (key0 + np.uint64(0x9E3779B9)) & WORD
        key1 = (key1 + np.uint64(0xBB67AE85)) & WORD
    return np.stack((c0, c1, c2, c3))
