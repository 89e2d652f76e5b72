"""Engine options: `EngineConfig`, checked once, never changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from titan.core.trees import MAX_NODES
from titan.kernels import backend
from titan.kernels.backend import MAX_TRITON_REQUESTS, TRITON_BLOCK_SIZES

DTYPES = ("auto", "float32", "bfloat16", "float16")
DRAFT_TREES = ("auto", "dynamic", "chain")
DRAFT_SAMPLINGS = ("auto", "greedy", "sampled")
SCHEDULING_POLICIES = ("fcfs",)
PREEMPTION_MODES = ("recompute",)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Options of an engine; see `titan.LLM` for what they mean.

    Raises:
        ValueError: a value is not allowed; the message names the argument, the value and what is allowed.
    """

    dtype: str = "auto"
    device: str = "auto"
    seed: int = 0
    use_speculative: bool = True
    max_draft_tokens: int = 6
    draft_tree: str | Sequence[int] = "auto"
    draft_sampling: str = "auto"
    max_batch_size: int = 32
    max_num_batched_tokens: int = 2048
    prefill_chunk_size: int = 512
    max_model_len: int | None = None
    block_size: int = 16
    num_kv_blocks: int | None = None
    kv_cache_memory: int | None = None
    enable_prefix_caching: bool = True
    scheduling_policy: str = "fcfs"
    max_waiting_requests: int = 2000
    preemption_mode: str = "recompute"
    swap_space: int = 0

    def __post_init__(self) -> None:
        _check_choice("dtype", self.dtype, DTYPES)
        _check_choice("draft_sampling", self.draft_sampling, DRAFT_SAMPLINGS)
        _check_choice("scheduling_policy", self.scheduling_policy, SCHEDULING_POLICIES)
        _check_choice("preemption_mode", self.preemption_mode, PREEMPTION_MODES)
        _check_choice("swap_space", self.swap_space, (0,))
        for name in ("use_speculative", "enable_prefix_caching"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r} is not allowed: it must be True or False")
        _check_range("seed", self.seed, 0, 2**63 - 1)
        _check_range("max_draft_tokens", self.max_draft_tokens, 0, MAX_NODES)
        self._check_draft_tree()
        for name in ("max_batch_size", "max_num_batched_tokens", "prefill_chunk_size", "max_waiting_requests"):
            _check_range(name, getattr(self, name), 1)
        for name in ("max_model_len", "num_kv_blocks", "kv_cache_memory"):
            if getattr(self, name) is not None:
                _check_range(name, getattr(self, name), 1)
        _check_choice("block_size", self.block_size, (8, 16, 32, 64, 128))
        if self.num_kv_blocks is not None and self.kv_cache_memory is not None:
            raise ValueError(
                f"num_kv_blocks={self.num_kv_blocks} and kv_cache_memory={self.kv_cache_memory} both set the size of the "
                f"KV cache: give at most one of them"
            )
        if self.max_num_batched_tokens < self.max_batch_size:
            raise ValueError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is less than max_batch_size={self.max_batch_size}: "
                f"every running request needs at least one token per step"
            )

    def check_device(self, device: torch.device) -> None:
        """Refuse what the kernels of a device cannot take.

        Raises:
            ValueError: as in the constructor.
        """
        if not backend.takes_triton(device):
            return
        if self.block_size not in TRITON_BLOCK_SIZES:
            allowed = " or ".join(map(str, TRITON_BLOCK_SIZES))
            raise ValueError(f"block_size={self.block_size} is not supported on {device}: it must be {allowed}")
        if self.max_batch_size > MAX_TRITON_REQUESTS:
            raise ValueError(
                f"max_batch_size={self.max_batch_size} is not supported on {device}: it must be at most {MAX_TRITON_REQUESTS}"
            )

    def _check_draft_tree(self) -> None:
        parents = self.draft_tree
        if isinstance(parents, str):
            _check_choice("draft_tree", parents, DRAFT_TREES)
            return
        is_list = isinstance(parents, Sequence) and all(isinstance(each, int) and not isinstance(each, bool) for each in parents)
        if not is_list or len(parents) == 0:
            raise ValueError(
                f"draft_tree={parents!r} is not allowed: it must be {', '.join(map(repr, DRAFT_TREES))} or a list of parents, "
                f"such as [-1, 0, -1]"
            )
        if len(parents) > self.max_draft_tokens:
            raise ValueError(
                f"draft_tree={list(parents)} has {len(parents)} nodes: at most max_draft_tokens={self.max_draft_tokens} are allowed"
            )
        for node, parent in enumerate(parents):
            if not -1 <= parent < node:
                raise ValueError(
                    f"draft_tree={list(parents)} is not topological: the parent of node {node} is {parent}, allowed are -1 (the "
                    f"root) to {node - 1}"
                )


def _check_choice(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}={value!r} is not supported; allowed: {', '.join(map(repr, allowed))}")


def _check_range(name: str, value: object, low: int, high: int | None = None) -> None:
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if not is_integer or value < low or (high is not None and value > high):  # type: ignore[operator]
        allowed = f"an integer >= {low}" if high is None else f"an integer from {low} to {high}"
        raise ValueError(f"{name}={value!r} is not allowed: it must be {allowed}")
