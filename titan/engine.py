"""The engine: one step proposes, verifies, commits and schedules for all requests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import psutil
import torch
from torch import Tensor

from titan.core.device_trees import DeviceTrees, Proposal, TreeOutline, outlines_of
from titan.core.options import EngineConfig, ModelOptions
from titan.core.request import Request
from titan.core.step import Acceptance, StepPlan
from titan.core.trees import DraftTree
from titan.draft.base import DraftContext, Drafter
from titan.draft.registry import DraftSpec, create_drafter, draft_model_config
from titan.execute.batch import RaggedBatch, Segment, build_batch
from titan.execute.memory_profile import CudaMemory, memory_for_kv
from titan.execute.model_runner import Runner, make_runner
from titan.kernels import backend
from titan.kernels.triton.cuda_graphs import PassCounts, PassLimits
from titan.memory.kv_cache import KVCache, allocate_kv, num_blocks_for
from titan.metrics import EngineCounters, EngineMetrics, ratio
from titan.models.config import ModelConfig
from titan.models.decoder import Decoder
from titan.models.loader import load_model, resolve_model
from titan.schedule.admission import Limits
from titan.schedule.scheduler import Scheduler
from titan.verify.accept import accept

KV_MEMORY_SHARE = 0.4
"""Share of a CPU's free memory that the KV cache takes at most, unless it is given."""

CUDA_KV_MEMORY_SHARE = 0.9
"""The same of what the largest passes leave of a CUDA device's memory; the rest is for graphs, and for drafts to come."""

StepObserver = Callable[[StepPlan, Acceptance], None]
"""Sees a step after its verification, while the requests still end at their roots; must change nothing."""


class Engine:
    """Owns the target, the drafter, the KV and the scheduler; ``observers`` are called in every step.

    Args:
        config: options.
        model: "demo", a folder, a hub id, or a decoder that is ready to run on the device, whatever the dtype asked for.
        draft: what drafts; see `titan.draft.registry`.
        tokenizer: the target's, a transformers tokenizer, which a draft's must agree with; ``None`` = not known.

    Raises:
        ValueError: a model cannot be loaded, the draft has another vocabulary, or the KV cache has no room.
    """

    def __init__(self, config: EngineConfig, model: str | Decoder, draft: DraftSpec = None, tokenizer: Any | None = None) -> None:
        self.config = config
        self.device = choose_device(config.model.device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # which is where Triton launches
        config.check_device(self.device)
        target = model
        if not isinstance(target, Decoder):
            target = load_model(resolve_model(target, "target"), dtype=config.model.dtype, device=self.device)
        self.model_config = target.config
        self.dtype = target.dtype
        self.max_model_len = _max_model_len(config.model, self.model_config)
        draft = draft if config.speculation.use_speculative and config.speculation.max_draft_tokens > 0 else None
        self.passes = PassCounts()
        num_kv_blocks = self._num_kv_blocks(target, draft_model_config(draft))
        block_size = config.memory.block_size
        self.limits = Limits(
            vocab_size=self.model_config.vocab_size,
            max_model_len=self.max_model_len,
            num_kv_blocks=num_kv_blocks,
            block_size=block_size,
        )
        self.kv = KVCache(num_kv_blocks, block_size, config.memory.enable_prefix_caching)
        target_kv = allocate_kv(
            self.model_config.num_layers,
            self.kv.pool.num_blocks,
            self.model_config.num_kv_heads,
            block_size,
            self.model_config.head_dim,
            dtype=self.dtype,
            device=self.device,
        )
        self.kv.attach("target", target_kv)
        self.runner = self._make_runner(target, target_kv)
        self.counters = EngineCounters()
        self.scheduler = Scheduler(config.schedule, self.kv, self.counters)
        self.observers: list[StepObserver] = []
        self._tokenizer = tokenizer
        self._use_drafter(create_drafter(draft, self._draft_context()))

    def step(self) -> list[Request]:
        """Run one step; returns the requests whose output changed."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # another engine, or another thread, may have another one
        with torch.inference_mode():
            plan = self.scheduler.schedule(min(self.drafter.max_draft_tokens, self.config.speculation.max_draft_tokens))
            if not plan.requests:
                return []
            self.kv.clear_new_blocks()
            trees = self.drafter.propose(plan)
            batch = self.build_batch(plan, trees)
            logits = self.runner.forward(batch)
            acceptance = accept(plan, trees, batch, logits)
            for observe in self.observers:
                observe(plan, acceptance)
            self.drafter.commit(plan, acceptance)
            self.kv.commit(plan, acceptance)
            return self.scheduler.update(plan, acceptance)

    def build_batch(self, plan: StepPlan, trees: Proposal) -> RaggedBatch:
        """The target's pass of a step: prefill chunks, decodes and root+tree segments side by side."""
        self._check_lengths(trees, len(plan.requests))
        segments = []
        for i, (request, tree) in enumerate(zip(plan.requests, outlines_of(trees), strict=True)):
            self._check_tree(tree, request, plan.draft_budgets[i])
            start = request.num_computed_tokens
            end = start + plan.num_tokens[i]
            segments.append(
                Segment(
                    request.block_ids,
                    start,
                    request.token_ids[start:end],
                    tree=tree,
                    root_position=end - 1,
                    needs_logits=end == request.num_tokens,
                )
            )
        batch = build_batch(segments, block_size=self.kv.block_size)
        return replace(batch, grown=trees.grown) if isinstance(trees, DeviceTrees) else batch

    def _check_lengths(self, trees: Proposal, num_rows: int) -> None:
        """Refuse what does not belong to a plan of so many rows, and trees on the device that are not what their outlines say."""
        drafter, outlines = f"the drafter {self.drafter.name!r}", outlines_of(trees)
        if len(outlines) != num_rows:
            raise ValueError(f"{drafter} proposed {len(outlines)} trees: the plan has {num_rows} rows")
        if not isinstance(trees, DeviceTrees):
            return
        num_nodes = int(trees.node_start_loc[-1])
        for name, column in trees.nodes._asdict().items():
            if len(column) != num_nodes:
                raise ValueError(f"{drafter} gave nodes.{name} of length {len(column)}: the outlines have {num_nodes} nodes")
        num_drawn = sum(outline.num_nodes + 1 for outline in trees.outlines if outline.is_drawn)
        num_rows = 0 if trees.draft_rows is None else len(trees.draft_rows)
        vocab_size = self.model_config.vocab_size
        if num_drawn and (trees.draft_probs is None or trees.draft_probs.shape[1] != vocab_size or num_rows != num_drawn):
            shape = None if trees.draft_probs is None else list(trees.draft_probs.shape)
            raise ValueError(
                f"{drafter} gave draft_probs of shape {shape} and {num_rows} draft_rows: they must be [any, {vocab_size}] and "
                f"{num_drawn}, of the roots and nodes of drawn trees"
            )

    def _check_tree(self, tree: DraftTree | TreeOutline, request: Request, budget: int) -> None:
        """Refuse what a drafter must not propose, before it reaches slots or embeddings that are not the request's."""
        if tree.num_nodes > budget:
            raise ValueError(f"the drafter {self.drafter.name!r} proposed {tree.num_nodes} nodes: at most {budget} were allowed")
        if isinstance(tree, TreeOutline):
            if tree.is_drawn and request.params.is_greedy:
                raise ValueError(
                    f"the drafter {self.drafter.name!r} drew a tree at temperature 0: it may at temperatures above 0 only"
                )
            return
        vocab_size = self.model_config.vocab_size
        token_ids = tree.token_ids.tolist()
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
            raise ValueError(f"the drafter {self.drafter.name!r} proposed token ids {token_ids}: allowed are 0 to {vocab_size - 1}")
        if tree.draft_probs is not None and (request.params.is_greedy or tree.draft_probs.shape[1] != vocab_size):
            raise ValueError(
                f"the drafter {self.drafter.name!r} gave draft_probs of shape {list(tree.draft_probs.shape)} at temperature "
                f"{request.params.temperature:g}: they must be [nodes with children, {vocab_size}], at temperatures above 0 only"
            )

    def swap_draft(self, draft: DraftSpec) -> None:
        """Change what drafts, between steps; requests in flight go on, and the new draft catches up with them.

        Raises:
            ValueError: as in the constructor; the present draft then stays.
        """
        if not self.config.speculation.use_speculative:
            raise ValueError("swap_draft() contradicts use_speculative=False: allowed with use_speculative=True only")
        if self.config.speculation.max_draft_tokens == 0:
            raise ValueError("swap_draft() contradicts max_draft_tokens=0: allowed with at least 1")
        self._use_drafter(create_drafter(draft, self._draft_context()))
        self.kv.new_draft_epoch((*self.scheduler.running, *self.scheduler.waiting))

    def metrics(self) -> EngineMetrics:
        """A snapshot of the engine's totals and state."""
        counters, scheduler, pool = self.counters, self.scheduler, self.kv.pool
        num_committed = sum(request.num_computed_tokens for request in scheduler.running)
        num_drafted = sum(min(request.num_drafted_context, request.num_computed_tokens) for request in scheduler.running)
        return EngineMetrics(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_finished_requests=counters.num_finished_requests,
            num_steps=counters.num_steps,
            num_emitted_tokens=counters.num_emitted_tokens,
            mean_batch_size=ratio(counters.num_sequence_steps, counters.num_steps),
            mean_acceptance_length=ratio(counters.num_emitted_tokens, counters.num_sequence_steps),
            proposed_per_depth=list(counters.proposed_per_depth),
            accepted_per_depth=list(counters.accepted_per_depth),
            acceptance_rate=ratio(sum(counters.accepted_per_depth), sum(counters.proposed_per_depth)),
            num_preemptions=counters.num_preemptions,
            prefix_cache_hit_rate=ratio(counters.num_cached_tokens, counters.num_admitted_tokens),
            kv_usage=1 - pool.num_free / pool.num_blocks,
            num_kv_blocks=pool.num_blocks,
            draft_coverage=ratio(num_drafted, num_committed) if scheduler.running else None,
            draft=self.drafter.name,
            graph_hit_rate=self.passes.hit_rate,
        )

    def _use_drafter(self, drafter: Drafter) -> None:
        if drafter.kv is None:
            self.kv.detach("draft")
        else:
            self.kv.attach("draft", drafter.kv)  # refuses a drafter made for another engine; the present one then stays
        self.drafter = drafter

    def _draft_context(self) -> DraftContext:
        return DraftContext(
            target_vocab_size=self.model_config.vocab_size,
            max_draft_tokens=self.config.speculation.max_draft_tokens,
            draft_tree=self.config.speculation.draft_tree,
            draft_sampling=self.config.speculation.draft_sampling,
            max_num_batched_tokens=self.config.schedule.max_num_batched_tokens,
            dtype=str(self.dtype).removeprefix("torch."),
            device=self.device,
            make_runner=self._make_runner,
            kv=self.kv,
            tokenizer=self._tokenizer,
        )

    def _make_runner(self, model: Decoder, kv: Tensor) -> Runner:
        return make_runner(model, kv, self._pass_limits(), self.passes)

    def _pass_limits(self) -> PassLimits:
        speculation = self.config.speculation
        num_drafts = speculation.max_draft_tokens if speculation.use_speculative else 0
        return PassLimits(self.config.schedule.max_batch_size, 1 + num_drafts, self._max_blocks_per_request())

    def _max_blocks_per_request(self) -> int:
        return -(-self.max_model_len // self.config.memory.block_size)

    def _num_kv_blocks(self, target: Decoder, draft_config: ModelConfig | None) -> int:
        """Blocks of the pool: as given, or by memory; each block costs target and draft bytes."""
        memory = self.config.memory
        if memory.num_kv_blocks is not None:
            return memory.num_kv_blocks
        bytes_per_token = self.model_config.kv_bytes_per_token(self.dtype)
        if draft_config is not None:
            bytes_per_token += draft_config.kv_bytes_per_token(self.dtype)
        bytes_per_block = bytes_per_token * memory.block_size
        if memory.kv_cache_memory is not None:
            try:
                return num_blocks_for(memory.kv_cache_memory, bytes_per_block)
            except ValueError as error:
                raise ValueError(f"kv_cache_memory={memory.kv_cache_memory} is not enough: {error}") from error
        useful = self.config.schedule.max_batch_size * self._max_blocks_per_request()
        return min(useful, num_blocks_for(self._kv_memory(target, draft_config), bytes_per_block))

    def _kv_memory(self, target: Decoder, draft_config: ModelConfig | None) -> int:
        """Bytes that the KV cache takes at most where the user has not said how many."""
        if not backend.takes_triton(self.device):
            return int(psutil.virtual_memory().available * KV_MEMORY_SHARE)
        probe = CudaMemory(self.device)
        return int(
            memory_for_kv(target, draft_config, self.config, self._pass_limits(), self.max_model_len, probe) * CUDA_KV_MEMORY_SHARE
        )


def choose_device(name: str) -> torch.device:
    """The device that ``name`` means, a CUDA device with its index; "auto" takes CUDA where there is one.

    Raises:
        ValueError: the device is unknown or absent.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device={name!r} is not a device: allowed are 'auto', 'cpu', 'cuda', 'cuda:N'") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device={name!r} is not supported: allowed are 'auto', 'cpu', 'cuda', 'cuda:N'")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device={name!r} is not here: {torch.cuda.device_count()} CUDA devices were found")
    if name == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _max_model_len(options: ModelOptions, model_config: ModelConfig) -> int:
    longest = model_config.max_position_embeddings
    if options.max_model_len is None:
        return longest
    if options.max_model_len > longest:
        raise ValueError(f"max_model_len={options.max_model_len} is more than the model's positions: at most {longest} is allowed")
    return options.max_model_len
