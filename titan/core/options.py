"""Engine options: `EngineConfig`, made of immutable groups that are validated once.

All of them raise ``ValueError`` if a value is not allowed; the message names the argument, the value and what is allowed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from os import PathLike
from secrets import randbits
from typing import Any, TypedDict, Unpack, cast

import torch

from titan.core.checks import (
    as_list,
    check_bool,
    check_choice,
    check_integer,
    check_number,
    check_options,
    check_path,
    check_text,
    is_integer,
    missing_members,
    option,
    optional,
    shown,
    unknown_names,
)
from titan.core.dtypes import RUN_DTYPES
from titan.core.limits import MAX_NODES
from titan.core.policy import SchedulingPolicy

DTYPES = ("auto", *RUN_DTYPES)
DTYPE_ALIASES = {"half": "float16", "float": "float32"} | {f"torch.{name}": name for name in RUN_DTYPES}
"""Other names of dtypes, among them those that torch's own print."""
GENERATION_CONFIGS = ("auto", "vllm")
MODEL_IMPLS = ("auto", "native", "transformers")
SPECULATIONS = ("adaptive", "fixed", "off")
SPECULATION_TARGETS = ("throughput", "latency")
DRAFT_TREES = ("auto", "dynamic", "chain")
DRAFT_SAMPLINGS = ("auto", "greedy", "sampled")
SCHEDULING_POLICIES = ("fcfs", "priority", "fair")
RESERVATIONS = ("on_demand", "max_tokens")
PREEMPTION_MODES = ("auto", "recompute", "swap")
MAX_THREADS = 1024
DRAFT_WEIGHT_BITS: tuple[int | str | None, ...] = ("auto", None, 8)
BLOCK_SIZES = (8, 16, 32, 64, 128)
KV_CACHE_DTYPES = ("auto", "int8")


def _check_device(name: str, device: object) -> str:
    """Return the name of a device that is given by it or by torch's object; whether there is such a device is checked later."""
    named = str(device) if isinstance(device, torch.device) else device
    if not isinstance(named, str):
        raise ValueError(f"{name}={shown(device)} is not supported: allowed are 'auto', 'cpu', 'cuda', 'cuda:N'")
    return named


def _check_seed(name: str, seed: int | None) -> int:
    return randbits(63) if seed is None else check_integer(name, seed, 0, 2**63 - 1)


def _check_draft_tree(name: str, draft_tree: object) -> str | list[int]:
    parents: Any = as_list(draft_tree)
    if isinstance(parents, str) and parents in DRAFT_TREES:
        return parents
    is_list = isinstance(parents, Sequence) and all(map(is_integer, parents))
    if not is_list or len(parents) == 0:
        raise ValueError(
            f"{name}={shown(parents)} is not allowed: it must be {', '.join(map(repr, DRAFT_TREES))} or a list of parents, "
            f"such as [-1, 0, -1]"
        )
    for node, parent in enumerate(parents):
        if not -1 <= parent < node:
            raise ValueError(
                f"{name}={shown(parents)} is not topological: the parent of node {node} is {parent}, allowed are -1 (the root) to "
                f"{node - 1}"
            )
    return parents  # type: ignore[no-any-return]


def _check_dtype(name: str, dtype: object) -> str:
    """Return the name of a dtype that models run in, given by one of its names or by torch's object."""
    dtype = str(dtype) if isinstance(dtype, torch.dtype) else dtype
    return check_choice(name, DTYPE_ALIASES.get(dtype, dtype) if isinstance(dtype, str) else dtype, DTYPES)


def _check_policy(name: str, policy: object) -> str | SchedulingPolicy:
    lacking = missing_members(policy, SchedulingPolicy)
    if not (lacking or isinstance(policy, type)):
        return cast(SchedulingPolicy, policy)
    try:
        return check_choice(name, policy, SCHEDULING_POLICIES)
    except ValueError as error:
        allowed = f"{error}, or an instance of a SchedulingPolicy"
    if isinstance(policy, type):
        raise ValueError(f"{allowed}, not the class")
    raise ValueError(allowed if isinstance(policy, str | None) else f"{allowed}, of which it lacks {', '.join(lacking)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """Options of the models, and settings common to all requests.

    Args:
        dtype: "auto" (the checkpoint's, which its weights say if its config does not; float32 on a CPU without bfloat16
            instructions), "float32", "bfloat16", "float16", or the torch dtype; "float" and "half" are float32 and float16.
        device: "auto" (CUDA if available, with Triton), "cpu", "cuda", "cuda:N", or the torch device.
        num_threads: threads of a CPU; ``None`` = one per physical core that the process may use, at most as many as PyTorch has.
            PyTorch cannot set the number for an engine's thread alone: a thread of yours whose first parallel operation in PyTorch
            runs during a step keeps PyTorch's number there, often 1, until it calls `torch.set_num_threads`.
        seed: for the requests that have none; ``None`` = another one for each engine.
        max_model_len: maximum tokens of a request, prompt and output; ``None`` = the model's positions.
        warm_up: at the start and for each new draft, compile and record all that passes on a GPU need, with a progress bar;
            ``False`` = when it is first needed, which delays requests. On a CPU there is nothing to compile or record.
        revision: branch, tag or commit of the target, and of its tokenizer, on the hub; ``None`` = the main branch, unless the
            model is given as ``ID@REVISION``, as drafts and other tokenizers may be, too.
        download_dir: folder for downloads from the hub; ``None`` = the hub library's cache.
        generation_config: where a call has no sampling params, "auto" uses those of the model's generation_config.json, and
            "vllm" (its name for it) `SamplingParams()`.
        model_impl: who computes the layers of target and draft: "native", Titan's own decoder; "transformers", that library's
            modules; "auto", the decoder where there is one for the model.
        trust_remote_code: run the code that a checkpoint comes with, if it is not for Titan's own decoder.
        draft_dtype: as ``dtype``, of the draft model, and of each that `LLM.swap_draft` brings; ``None`` = that of the target.
            Drafters without a model have none.
        draft_weight_bits: 8 rounds the matrices of draft models of Titan's own decoder to 3 bits of mantissa. A CPU with AVX2 or
            AVX-512 then reads 8 bits each, where others take 16 or 12, and so does a GPU in bfloat16 for few rows, with half as
            much memory again. What is proposed changes a little, no output's distribution does. "auto" = 8 where kernels can
            read them so, else as they are; ``None`` = as they are.
    """

    dtype: str | torch.dtype = option("auto", _check_dtype)
    device: str = option("auto", _check_device)
    num_threads: int | None = option(None, optional(check_integer), low=1, high=MAX_THREADS)
    seed: int | None = option(0, _check_seed)
    max_model_len: int | None = option(None, optional(check_integer), low=2)
    warm_up: bool = option(True, check_bool)
    revision: str | None = option(None, check_text)
    download_dir: str | None = option(None, check_path)
    generation_config: str = option("auto", check_choice, allowed=GENERATION_CONFIGS)
    model_impl: str = option("auto", check_choice, allowed=MODEL_IMPLS)
    trust_remote_code: bool = option(False, check_bool)
    draft_dtype: str | torch.dtype | None = option(None, optional(_check_dtype))
    draft_weight_bits: int | str | None = option("auto", check_choice, allowed=DRAFT_WEIGHT_BITS)

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationOptions:
    """Options of drafting: how much is drafted, and in which way.

    Args:
        speculation: how much is drafted: "adaptive", as much as pays, at each step; "fixed", ``max_draft_tokens``
            wherever the output, the step, the KV cache and the drafter leave room for them; "off", nothing, even with a draft
            model.
        speculation_target: what "adaptive" maximises: "throughput", tokens per second of all requests together, or "latency", the
            geometric mean of the requests' tokens per second.
        max_draft_tokens: maximum draft tokens per request and step, 1 to 63.
        draft_tree: shape of the draft tree: "chain"; "dynamic", grown by the draft's cumulative probability; a list of parents
            (-1 = the root); or "auto", chosen per request and step.
        draft_sampling: "greedy" proposes the draft's most likely tokens, "sampled" samples them at the request's temperature,
            "auto" samples them unless the request has a seed of its own: its tokens then do not depend on what is drafted. At
            temperature 0 all three are greedy.
    """

    speculation: str = option("adaptive", check_choice, allowed=SPECULATIONS)
    speculation_target: str = option("throughput", check_choice, allowed=SPECULATION_TARGETS)
    max_draft_tokens: int = option(6, check_integer, low=1, high=MAX_NODES)
    draft_tree: str | Sequence[int] = option("auto", _check_draft_tree)
    draft_sampling: str = option("auto", check_choice, allowed=DRAFT_SAMPLINGS)

    def __post_init__(self) -> None:
        check_options(self)
        if self.speculation != "adaptive" and self.speculation_target != "throughput":
            raise ValueError(
                f"speculation_target={self.speculation_target!r} contradicts speculation={self.speculation!r}: it is allowed with "
                f"'adaptive' alone"
            )
        parents = self.draft_tree
        if not isinstance(parents, str) and len(parents) > self.max_draft_tokens:
            raise ValueError(
                f"draft_tree={shown(parents)} has {len(parents)} nodes: "
                f"at most max_draft_tokens={self.max_draft_tokens} are allowed"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleOptions:
    """Options of scheduling: which requests run in a step, with how many tokens, and which wait.

    Args:
        max_batch_size: maximum number of requests that run at once.
        max_num_batched_tokens: maximum tokens of the target in one step, draft tokens included.
        prefill_chunk_size: maximum prompt tokens of one request in one step; ``None`` = as many as the step takes.
        max_prefill_tokens: maximum prompt tokens of all requests in one step; ``None`` = as many as the step takes.
        max_inter_token_s: seconds between tokens that prompts should keep to: a step in which requests decode takes only as many
            prompt tokens as its time allows by what steps have taken, and 16 in any case. ``None`` = no such target; nor is there
            one if passes cannot be measured, of which there is a warning.
        scheduling_policy: who starts next: "fcfs", in order of arrival; "priority", by class and deadline
            (`titan.schedule.policies.priority`); "fair", users share alike (`titan.schedule.policies.fair`); or a
            `titan.core.policy.SchedulingPolicy`, which belongs to one engine.
        reservation: when a waiting request starts: "on_demand", as soon as the running ones and it have blocks for their next step,
            so that it or another may be preempted later; "max_tokens", when they all have blocks to the ends of their longest
            outputs, so that none ever is.
        max_waiting_requests: maximum number of requests that wait at once; `LLM.generate` takes more and queues them in turn.
        preemption_mode: what becomes of the KV of a request that must make room: "recompute", it is computed again; "swap", it is
            copied to the swap space and back; "auto", what is expected to take less time, or "swap" where that is not measured. It
            is computed again whenever the swap space is full.
        swap_space: bytes of the host's memory for the KV of such requests and, with prefix caching, for prefixes that the KV
            cache has no more room for; 0 = none, all that "recompute" without prefix caching allows. Target and draft together, as
            `MemoryOptions.kv_cache_memory`.
    """

    max_batch_size: int = option(32, check_integer, low=1)
    max_num_batched_tokens: int = option(2048, check_integer, low=1)
    prefill_chunk_size: int | None = option(512, optional(check_integer), low=1)
    max_prefill_tokens: int | None = option(None, optional(check_integer), low=1)
    max_inter_token_s: float | None = option(None, optional(check_number), low=0.0, open_low=True)
    scheduling_policy: str | SchedulingPolicy = option("fcfs", _check_policy)
    reservation: str = option("on_demand", check_choice, allowed=RESERVATIONS)
    max_waiting_requests: int = option(2000, check_integer, low=1)
    preemption_mode: str = option("auto", check_choice, allowed=PREEMPTION_MODES)
    swap_space: int = option(0, check_integer, low=0)

    def __post_init__(self) -> None:
        check_options(self)
        if self.max_num_batched_tokens < self.max_batch_size:
            raise ValueError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is less than max_batch_size={self.max_batch_size}: "
                f"every running request needs at least one token per step"
            )
        if self.preemption_mode == "swap" and not self.swap_space:
            raise ValueError("preemption_mode='swap' contradicts swap_space=0: allowed is the size of a swap space in bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryOptions:
    """Size and use of the KV cache.

    Args:
        block_size: tokens per KV block: 8, 16, 32, 64 or 128; on CUDA 16 or 32.
        num_kv_blocks: blocks in the KV cache; ``None`` = sized by memory.
        kv_cache_memory: bytes for the KV cache of target and draft together; ``None`` = what ``max_batch_size`` requests of
            ``max_model_len`` tokens need, within 40 % of the host's free memory, or its container's, or 90 % of what the largest
            passes leave on a GPU.
        memory_utilization: share of the device's memory that may be in use, by anyone: the KV cache leaves the rest free. On a
            CPU it is that of the machine, or of its container. ``None`` = as for ``kv_cache_memory``; in (0, 1].
        enable_prefix_caching: reuse the KV of common prefixes.
        kv_cache_dtype: how the target's keys and values are stored: "auto" is the model's dtype; "int8" takes about half the bytes
            of bfloat16, with a scale for each token and head, and changes the output a little.
        draft_kv_cache_dtype: likewise, of a draft model, where it changes only what is drafted.
    """

    block_size: int = option(16, check_choice, allowed=BLOCK_SIZES)
    num_kv_blocks: int | None = option(None, optional(check_integer), low=1)
    kv_cache_memory: int | None = option(None, optional(check_integer), low=1)
    memory_utilization: float | None = option(None, optional(check_number), low=0.0, high=1.0, open_low=True)
    enable_prefix_caching: bool = option(True, check_bool)
    kv_cache_dtype: str = option("auto", check_choice, allowed=KV_CACHE_DTYPES)
    draft_kv_cache_dtype: str = option("auto", check_choice, allowed=KV_CACHE_DTYPES)

    def __post_init__(self) -> None:
        check_options(self)
        sizes = ("num_kv_blocks", "kv_cache_memory", "memory_utilization")
        given = [f"{name}={getattr(self, name)}" for name in sizes if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} set the size of the KV cache: give at most one of them")


def weight_bits_of(text: str) -> int | str | None:
    """Read ``draft_weight_bits`` from a command line; `ModelOptions` checks it."""
    return int(text) if text.isdecimal() else None if text.lower() == "none" else text


def draft_tree_of(text: str) -> str | tuple[int, ...]:
    """Read ``draft_tree`` from a command line, parents such as -1,0,-1 in brackets or not; `SpeculationOptions` checks it."""
    try:
        return tuple(map(int, text.strip("[]").split(",")))
    except ValueError:
        return text


class EngineOptions(TypedDict, total=False):
    """The options of all groups by name, for type checkers; the groups define defaults and meanings."""

    dtype: str | torch.dtype
    device: str | torch.device
    num_threads: int | None
    seed: int | None
    max_model_len: int | None
    warm_up: bool
    revision: str | None
    download_dir: str | PathLike[str] | None
    generation_config: str
    model_impl: str
    trust_remote_code: bool
    draft_dtype: str | torch.dtype | None
    draft_weight_bits: int | str | None
    speculation: str
    speculation_target: str
    max_draft_tokens: int
    draft_tree: str | Sequence[int]
    draft_sampling: str
    max_batch_size: int
    max_num_batched_tokens: int
    prefill_chunk_size: int | None
    max_prefill_tokens: int | None
    max_inter_token_s: float | None
    scheduling_policy: str | SchedulingPolicy
    reservation: str
    max_waiting_requests: int
    preemption_mode: str
    swap_space: int
    block_size: int
    num_kv_blocks: int | None
    kv_cache_memory: int | None
    memory_utilization: float | None
    enable_prefix_caching: bool
    kv_cache_dtype: str
    draft_kv_cache_dtype: str


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Options of an engine; each part of the engine takes the group that it needs."""

    model: ModelOptions = field(default_factory=ModelOptions)
    speculation: SpeculationOptions = field(default_factory=SpeculationOptions)
    schedule: ScheduleOptions = field(default_factory=ScheduleOptions)
    memory: MemoryOptions = field(default_factory=MemoryOptions)

    def __post_init__(self) -> None:
        swap_space = self.schedule.swap_space
        if swap_space and self.schedule.preemption_mode == "recompute" and not self.memory.enable_prefix_caching:
            raise ValueError(
                f"swap_space={swap_space} contradicts preemption_mode='recompute' and enable_prefix_caching=False, with which "
                f"nothing is swapped out: allowed is 0, or another preemption mode, or prefix caching"
            )

    @classmethod
    def of(cls, **options: Unpack[EngineOptions]) -> EngineConfig:
        """Build the groups from options given by name.

        Raises:
            TypeError: there is no option of that name.
        """
        left: dict[str, Any] = dict(options)
        groups = {}
        for each in fields(cls):
            group: Any = each.default_factory
            groups[each.name] = group(**{option.name: left.pop(option.name) for option in fields(group) if option.name in left})
        if left:
            raise TypeError(unknown_names(left, list(EngineOptions.__annotations__)))
        return cls(**groups)
