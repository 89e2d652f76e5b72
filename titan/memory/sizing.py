"""The numbers of blocks in the KV cache and in the swap space."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import floor, inf

from titan.core.kv_tensor import KVLayout
from titan.core.options import MemoryOptions
from titan.kernels.interfaces import Backend, KVMemory


def check_swap_space(swap_space: int, bytes_per_block: int, free_memory: float = inf) -> None:
    """Check that a swap space of this many bytes fits the free memory of the host, and holds a block; 0 bytes are no swap space.

    Raises:
        ValueError: it does not.
    """
    if swap_space and swap_space > free_memory:
        raise ValueError(
            f"swap_space={swap_space} is more than the {free_memory} bytes of the host that are free: allowed are at most these"
        )
    if 0 < swap_space < bytes_per_block:
        raise ValueError(f"swap_space={swap_space} is not enough: one block takes {bytes_per_block} bytes")


def num_kv_blocks(
    options: MemoryOptions,
    layouts: Sequence[KVLayout],
    num_useful: int,
    backend: Backend,
    run_largest_passes: Callable[[], None],
) -> int:
    """Return the number of blocks in the KV cache: as the options give it, else as many as fit the memory.

    Args:
        options: the user's.
        layouts: of the target's and the draft's cache, in which a block takes memory.
        num_useful: upper bound unless the options give a size: running requests can hold no more blocks.
        backend: tells how much memory there is.
        run_largest_passes: as for `Backend.memory_for_kv`; called only if the user has not given a size.

    Raises:
        ValueError: not even one block fits, or the user has given more than fits.
    """
    bytes_per_block = block_bytes(options.block_size, layouts)
    given = options.kv_cache_memory or (options.num_kv_blocks or 0) * bytes_per_block
    if given and given > (num_free := backend.free_memory()):
        if options.kv_cache_memory is not None:
            raise ValueError(f"kv_cache_memory={given} is more than the {num_free} bytes that are free: allowed are at most these")
        raise ValueError(
            f"num_kv_blocks={options.num_kv_blocks} takes {given} bytes, and {num_free} are free: at most "
            f"{num_free // bytes_per_block} blocks are allowed"
        )
    if options.num_kv_blocks is not None:
        return options.num_kv_blocks
    if options.kv_cache_memory is not None:
        num_blocks = options.kv_cache_memory // bytes_per_block
        if not num_blocks:
            raise ValueError(f"kv_cache_memory={options.kv_cache_memory} is not enough: one block takes {bytes_per_block} bytes")
        return num_blocks
    memory, share = backend.memory_for_kv(run_largest_passes), options.memory_utilization
    num_bytes = memory.default if share is None else int(memory.free - (1 - share) * memory.total)
    if num_bytes < bytes_per_block:
        raise ValueError(_too_few(memory, share, num_bytes, bytes_per_block))
    return min(num_useful, num_bytes // bytes_per_block)


def _too_few(memory: KVMemory, share: float | None, num_bytes: int, bytes_per_block: int) -> str:
    """Return the message for memory that does not hold a single block: what there is, and what to set."""
    asked = "the KV cache would get" if share is None else f"memory_utilization={share} leaves the KV cache"
    if memory.free < bytes_per_block:
        advice = "a smaller model or dtype, or less memory in use by others, would leave more"
    elif share is None:
        advice = f"give kv_cache_memory, {bytes_per_block} to {memory.free}"
    else:
        least = 1 - (memory.free - bytes_per_block) / memory.total
        advice = f"give {min(1.0, (floor(least * 1000) + 1) / 1000)} or more"
    return (
        f"{asked} {max(0, num_bytes)} bytes, and one block takes {bytes_per_block}: of the memory, {memory.total} bytes, "
        f"{max(0, memory.free)} are free beside the models; {advice}"
    )


def block_bytes(block_size: int, layouts: Iterable[KVLayout]) -> int:
    """Return the bytes that one block takes in the caches of these layouts together."""
    return block_size * sum(layout.bytes_per_token for layout in layouts)
