"""Tile sizes of tree attention: a checked-in table, and safe sizes for what the table lacks.

Nothing is tuned while serving.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

INTERPRETED_MULTIPROCESSORS = 4
"""Number assumed in the interpreter, which runs one program after the other."""
SM90 = 90
"""Compute capability 9.0, that of an H100 or H200."""


@dataclass(frozen=True, slots=True)
class TileConfig:
    """The tiling of one launch of tree attention."""

    block_m: int  # query rows of a tile: 16, 32, 64 or 128; products of a warp group start at 64
    block_n: int  # slots per iteration
    num_warps: int
    num_stages: int  # block ids are loaded ahead of keys and values, which have (num_stages - 1) // 2 buffers
    programs_per_multiprocessor: int  # at a time, by registers and shared memory


LARGE = 512
"""Padded size of heads above 256, those of latents with their rotated part included; tiles of 64 rows do not fit in registers."""

# (capability, padded head_dim, bytes per element) -> ascending by block_m; from the compiler's reports, not timed yet
TABLE = {
    (SM90, 64, 2): (
        TileConfig(16, 64, 4, 5, 4),
        TileConfig(32, 64, 4, 5, 3),
        TileConfig(64, 64, 4, 5, 2),
        TileConfig(128, 64, 8, 5, 1),
    ),
    (SM90, 128, 2): (
        TileConfig(16, 64, 4, 5, 3),
        TileConfig(32, 64, 4, 5, 2),
        TileConfig(64, 64, 4, 5, 2),
        TileConfig(128, 64, 8, 5, 1),
    ),
    (SM90, 256, 2): (
        TileConfig(16, 32, 4, 5, 2),
        TileConfig(32, 32, 4, 5, 2),
        TileConfig(64, 32, 8, 5, 1),
        TileConfig(128, 32, 8, 3, 1),
    ),
    (SM90, LARGE, 2): (
        TileConfig(16, 32, 8, 5, 1),
        TileConfig(32, 32, 8, 5, 1),
    ),
}

SAFE_CONFIGS = (
    TileConfig(16, 32, 4, 3, 2),
    TileConfig(32, 32, 4, 3, 2),
    TileConfig(64, 32, 8, 3, 1),
)
"""Tiles for other devices and head sizes: at most 96 KiB of shared memory."""

SAFE_LARGE_CONFIGS = (
    TileConfig(16, 32, 8, 3, 1),
    TileConfig(32, 32, 8, 3, 1),
)
"""Those of heads above 256: at most 98 KiB."""

FLOAT32_CONFIGS = (TileConfig(16, 32, 8, 3, 2),)
"""Tiles for float32, which is multiplied without tensor cores; larger ones do not fit in registers."""

FLOAT32_LARGE_CONFIGS = (TileConfig(16, 32, 8, 3, 1),)
"""Tiles for float32 and heads above 256."""


def tile_config(max_rows: int | None, *, head_dim: int, dtype: torch.dtype, device: torch.device) -> TileConfig:
    """Return the smallest tiles that hold the rows of one request, or else the largest available.

    Args:
        max_rows: of a request and KV head; ``None``: any number.
        head_dim: sum of the padded sizes of the parts of a key.
        dtype: of queries, keys and values.
        device: where the kernel runs.
    """
    is_large = head_dim > 256
    configs: Sequence[TileConfig]
    if dtype == torch.float32:
        configs = FLOAT32_LARGE_CONFIGS if is_large else FLOAT32_CONFIGS
    else:
        known = TABLE.get((capability_of(device), LARGE if is_large else head_dim, dtype.itemsize))
        configs = known or (SAFE_LARGE_CONFIGS if is_large else SAFE_CONFIGS)
    return next((config for config in configs if max_rows is not None and config.block_m >= max_rows), configs[-1])


def capability_of(device: torch.device) -> int:
    """Return ten times the compute capability of a device, as keys of `TABLE` have it; `SM90` is assumed in the interpreter."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return 10 * major + minor
    return SM90


def num_multiprocessors(device: torch.device) -> int:
    """Return the number of the device's multiprocessors."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).multi_processor_count)
    return INTERPRETED_MULTIPROCESSORS
