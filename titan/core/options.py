"""Engine options: `EngineConfig`, made of immutable groups that are validated once.

All of them raise ``ValueError`` if a value is not allowed; the message names the argument, the value and what is allowed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypedDict, Unpack

from titan.core.checks import check_bool, check_choice, check_integer, check_text
from titan.core.limits import MAX_NODES

DTYPES = ("auto", "float32", "bfloat16", "float16")
DRAFT_TREES = ("auto", "dynamic", "chain")
DRAFT_SAMPLINGS = ("auto", "greedy", "sampled")
SCHEDULING_POLICIES = ("fcfs",)
PREEMPTION_MODES = ("recompute",)
MAX_THREADS = 1024
BLOCK_SIZES = (8, 16, 32, 64, 128)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """How the models run, and settings common to all requests.

    Args:
        dtype: "auto" (the checkpoint's; float32 on a CPU without bfloat16 instructions), "float32", "bfloat16", "float16".
        device: "auto" (CUDA if available), "cpu", "cuda", "cuda:N".
        num_threads: threads of a CPU; ``None`` = one per physical core that the process may use, at most as many as PyTorch has.
        seed: for the requests that have none.
        max_model_len: maximum tokens of a request, prompt and output; ``None`` = the model's positions.
        warm_up: compile and record all that passes on a GPU need at the start, and for each new draft, with a progress bar;
            ``False``: when it is first needed, which delays requests. On a CPU there is nothing to compile or record, either way.
        revision: branch, tag or commit of the target, and of its tokenizer, on the hub; ``None`` = the main branch.
        download_dir: folder for downloads from the hub; ``None`` = the hub library's cache.
    """

    dtype: str = "auto"
    device: str = "auto"
    num_threads: int | None = None
    seed: int = 0
    max_model_len: int | None = None
    warm_up: bool = True
    revision: str | None = None
    download_dir: str | None = None

    def __post_init__(self) -> None:
        check_choice("dtype", self.dtype, DTYPES)
        check_integer("seed", self.seed, 0, 2**63 - 1)
        if self.num_threads is not None:
            check_integer("num_threads", self.num_threads, 1, MAX_THREADS)
        if self.max_model_len is not None:
            check_integer("max_model_len", self.max_model_len, 1)
        check_bool("warm_up", self.warm_up)
        for name in ("revision", "download_dir"):
            check_text(name, getattr(self, name))


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationOptions:
    """How much is drafted, and how.

    Args:
        use_speculative: ``False`` disables drafting, whatever the draft model.
        max_draft_tokens: maximum draft tokens per request and step, 0 to 63.
        draft_tree: shape of the draft tree: "chain"; "dynamic", grown by the draft's cumulative probability; a list of parents
            (-1 = the root); or "auto", chosen per request and step.
        draft_sampling: "greedy" proposes the draft's most likely tokens, "sampled" samples them at the request's temperature,
            "auto" chooses what the target has matched better at the request's roots so far. At temperature 0 all three are greedy.
    """

    use_speculative: bool = True
    max_draft_tokens: int = 6
    draft_tree: str | Sequence[int] = "auto"
    draft_sampling: str = "auto"

    def __post_init__(self) -> None:
        check_choice("draft_sampling", self.draft_sampling, DRAFT_SAMPLINGS)
        check_bool("use_speculative", self.use_speculative)
        check_integer("max_draft_tokens", self.max_draft_tokens, 0, MAX_NODES)
        self._check_draft_tree()

    def _check_draft_tree(self) -> None:
        parents = self.draft_tree
        if isinstance(parents, str):
            check_choice("draft_tree", parents, DRAFT_TREES)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleOptions:
    """Which requests run in a step, with how many tokens, and which wait.

    Args:
        max_batch_size: maximum number of requests that run at once.
        max_num_batched_tokens: maximum tokens of the target in one step, draft tokens included.
        prefill_chunk_size: maximum prompt tokens of one request in one step.
        scheduling_policy: "fcfs".
        max_waiting_requests: maximum number of requests that wait at once; `LLM.generate` takes more and queues them in turn.
        preemption_mode: "recompute".
        swap_space: 0.
    """

    max_batch_size: int = 32
    max_num_batched_tokens: int = 2048
    prefill_chunk_size: int = 512
    scheduling_policy: str = "fcfs"
    max_waiting_requests: int = 2000
    preemption_mode: str = "recompute"
    swap_space: int = 0

    def __post_init__(self) -> None:
        check_choice("scheduling_policy", self.scheduling_policy, SCHEDULING_POLICIES)
        check_choice("preemption_mode", self.preemption_mode, PREEMPTION_MODES)
        check_choice("swap_space", self.swap_space, (0,))
        for name in ("max_batch_size", "max_num_batched_tokens", "prefill_chunk_size", "max_waiting_requests"):
            check_integer(name, getattr(self, name), 1)
        if self.max_num_batched_tokens < self.max_batch_size:
            raise ValueError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is less than max_batch_size={self.max_batch_size}: "
                f"every running request needs at least one token per step"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryOptions:
    """Size and use of the KV cache.

    Args:
        block_size: tokens per KV block: 8, 16, 32, 64 or 128; on CUDA 16 or 32.
        num_kv_blocks: blocks in the KV cache; ``None`` = sized by memory.
        kv_cache_memory: bytes for the KV cache of target and draft together; ``None`` = what ``max_batch_size`` requests of
            ``max_model_len`` tokens need, within 40 % of a CPU's free memory, or 90 % of what the largest passes leave on a GPU.
        enable_prefix_caching: reuse the KV of common prefixes.
    """

    block_size: int = 16
    num_kv_blocks: int | None = None
    kv_cache_memory: int | None = None
    enable_prefix_caching: bool = True

    def __post_init__(self) -> None:
        check_choice("block_size", self.block_size, BLOCK_SIZES)
        for name in ("num_kv_blocks", "kv_cache_memory"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), 1)
        if self.num_kv_blocks is not None and self.kv_cache_memory is not None:
            raise ValueError(
                f"num_kv_blocks={self.num_kv_blocks} and kv_cache_memory={self.kv_cache_memory} both set the size of the "
                f"KV cache: give at most one of them"
            )
        check_bool("enable_prefix_caching", self.enable_prefix_caching)


class EngineOptions(TypedDict, total=False):
    """The options of all groups by name, for type checkers; the groups define defaults and meanings."""

    dtype: str
    device: str
    num_threads: int | None
    seed: int
    max_model_len: int | None
    warm_up: bool
    revision: str | None
    download_dir: str | None
    use_speculative: bool
    max_draft_tokens: int
    draft_tree: str | Sequence[int]
    draft_sampling: str
    max_batch_size: int
    max_num_batched_tokens: int
    prefill_chunk_size: int
    scheduling_policy: str
    max_waiting_requests: int
    preemption_mode: str
    swap_space: int
    block_size: int
    num_kv_blocks: int | None
    kv_cache_memory: int | None
    enable_prefix_caching: bool


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Options of an engine; each part of the engine takes the group that it needs."""

    model: ModelOptions = field(default_factory=ModelOptions)
    speculation: SpeculationOptions = field(default_factory=SpeculationOptions)
    schedule: ScheduleOptions = field(default_factory=ScheduleOptions)
    memory: MemoryOptions = field(default_factory=MemoryOptions)

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
            unknown, allowed = ", ".join(map(repr, left)), ", ".join(EngineOptions.__annotations__)
            raise TypeError(f"there is no option {unknown}; allowed: {allowed}")
        return cls(**groups)
