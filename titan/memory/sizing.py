"""The number of blocks in the pool."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from titan.core.kv_tensor import KVLayout
from titan.core.options import MemoryOptions


def num_swap_blocks(swap_space: int, layouts: Sequence[KVLayout], block_size: int, free_memory: int) -> int:
    """Return the number of blocks in a swap space.

    Args:
        swap_space: its bytes.
        layouts: of the target's and the draft's cache.
        block_size: tokens per block.
        free_memory: bytes of the host that can be allocated.

    Raises:
        ValueError: there is less memory, or not even one block fits.
    """
    if not swap_space:
        return 0
    bytes_per_block = block_bytes(block_size, layouts)
    if swap_space > free_memory:
        raise ValueError(
            f"swap_space={swap_space} is more than the {free_memory} bytes of the host that are free: allowed are at most these"
        )
    if swap_space < bytes_per_block:
        raise ValueError(f"swap_space={swap_space} is not enough: one block takes {bytes_per_block} bytes")
    return swap_space // bytes_per_block


def num_kv_blocks(
    options: MemoryOptions,
    layouts: Sequence[KVLayout],
    num_useful: int,
    default_memory: Callable[[], int],
    free_memory: Callable[[], int],
) -> int:
    """Return the number of blocks, as given or by memory: each takes the bytes of the target's and the draft's cache together.

    Args:
        options: the user's.
        layouts: of these caches.
        num_useful: upper bound, above which blocks are of no use.
        default_memory: returns the bytes that the caches may take; called only if the user has not given a size.
        free_memory: returns the bytes that can be allocated; called only if the user has given a size.

    Raises:
        ValueError: not even one block fits, or the user has given more than fits.
    """
    bytes_per_block = block_bytes(options.block_size, layouts)
    given = options.kv_cache_memory or (options.num_kv_blocks or 0) * bytes_per_block
    if given and given > (num_free := free_memory()):
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
    num_bytes = default_memory()
    if num_bytes < bytes_per_block:
        why = "" if options.memory_utilization is None else f"memory_utilization={options.memory_utilization} leaves too few: "
        raise ValueError(f"{why}{num_bytes} bytes of KV cache memory are too few: one block takes {bytes_per_block} bytes")
    return min(num_useful, num_bytes // bytes_per_block)


def block_bytes(block_size: int, layouts: Iterable[KVLayout]) -> int:
    """Return the bytes that one block takes in the caches of these layouts together."""
    return block_size * sum(layout.bytes_per_token for layout in layouts)
