"""The engines that are compared: Titan, and what transformers offers, behind one small interface."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from logging import ERROR, getLogger
from typing import Any, Protocol

import torch

from titan import LLM
from titan.bench.profiling import greedy_params, timed
from titan.bench.workloads import Workload
from titan.draft.registry import draft_model_config
from titan.models.loader import DTYPES, resolve_model

TITAN = "titan"
TITAN_DRAFT = "titan-draft"
STATIC = "transformers-static"
CONTINUOUS = "transformers-continuous"
ASSISTED = "transformers-assisted"

MODES = {
    TITAN: "Titan without a draft",
    TITAN_DRAFT: "Titan with the draft",
    STATIC: "transformers' generate: one static batch, dynamic cache",
    CONTINUOUS: "transformers' generate_batch: continuous batching over a paged cache, with its default attention (sdpa on a CPU)",
    ASSISTED: "transformers' assisted generation: one request at a time, constant number of draft tokens",
}
DRAFT_MODES = (TITAN_DRAFT, ASSISTED)


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a workload."""

    token_ids: list[list[int]]  # generated, in the order of the prompts
    seconds: float
    mean_acceptance_length: float | None  # tokens per request and target step; None: not known


@dataclass(frozen=True, slots=True)
class RunnerOptions:
    """What all runners of one dtype share."""

    model: str
    draft_model: str | None
    dtype: str
    max_draft_tokens: int
    max_batch_size: int
    max_model_len: int  # tokens


class Runner(Protocol):
    """Runs workloads greedily, ignoring the end of sequence."""

    def run(self, workload: Workload) -> Run: ...


class TitanRunner:
    """Titan; ``llm`` is open to be profiled."""

    def __init__(self, options: RunnerOptions, draft_model: str | None) -> None:
        self.llm = LLM(
            options.model,
            draft_model,
            dtype=options.dtype,
            max_draft_tokens=options.max_draft_tokens,
            max_batch_size=options.max_batch_size,
            max_model_len=options.max_model_len,
        )

    def run(self, workload: Workload) -> Run:
        start = time.perf_counter()
        outputs = self.llm.generate(workload.prompts, greedy_params(workload.output_len), use_tqdm=False)
        seconds = time.perf_counter() - start
        num_steps = sum(output.metrics.num_sequence_steps for output in outputs)
        return Run([output.outputs[0].token_ids for output in outputs], seconds, workload.num_output_tokens / num_steps)


class StaticRunner:
    """`generate` over all prompts as one batch; with an assistant, assisted generation (one prompt only)."""

    def __init__(self, model: Any, assistant: Any = None) -> None:
        self.model = model
        self.assistant = assistant

    def run(self, workload: Workload) -> Run:
        prompts = torch.tensor(workload.prompts, device=self.model.device)
        options: dict[str, Any] = {"do_sample": False, "max_new_tokens": workload.output_len, "pad_token_id": 0}
        if self.assistant is not None:
            options["assistant_model"] = self.assistant
        with timed(self.model, "forward") as forward:
            start = time.perf_counter()
            output = self.model.generate(prompts, attention_mask=torch.ones_like(prompts), **options)
            seconds = time.perf_counter() - start
        token_ids = output[:, prompts.shape[1] :].tolist()
        return Run(token_ids, seconds, None if self.assistant is None else workload.output_len / forward.num_calls)


class ContinuousRunner:
    """`generate_batch`, with a cache that holds every request; its manager lives on while the number of requests stays.

    The clock stops when the last request is finished, before the manager winds down.
    """

    PAGE_SIZE = 256  # tokens, the default of transformers
    MAX_BATCH_TOKENS = 512  # per step; a longer step costs more, as each token attends to the whole cache under a mask

    def __init__(self, model: Any, max_model_len: int) -> None:
        self.model = model
        self.pages_per_request = -(-max_model_len // self.PAGE_SIZE)
        self._num_requests = 0

    def run(self, workload: Workload) -> Run:
        from transformers import GenerationConfig

        config = self._batching_config(len(workload.prompts))
        generation = GenerationConfig(do_sample=False, max_new_tokens=workload.output_len, eos_token_id=-1)
        start = time.perf_counter()
        results = self.model.generate_batch(
            workload.prompts, generation_config=generation, continuous_batching_config=config, persistent_manager=True
        )
        errors = [result.error for result in results.values() if result.error is not None]
        if errors or len(results) != len(workload.prompts):
            raise RuntimeError(f"generate_batch failed: {errors or 'outputs are missing'}")
        seconds = max(result.lifespan[1] for result in results.values()) - start  # the end of its thread takes 0.2 s more
        return Run([result.generated_tokens for result in results.values()], seconds, None)

    def _batching_config(self, num_requests: int) -> Any:
        """Return the options for this many requests; a manager made for another number goes."""
        from transformers import ContinuousBatchingConfig

        if num_requests != self._num_requests:
            self.model.destroy_cached_continuous_batching_manager()
            self._num_requests = num_requests
        return ContinuousBatchingConfig(
            page_size=self.PAGE_SIZE,
            num_blocks=num_requests * self.pages_per_request + 1,
            max_batch_tokens=max(self.MAX_BATCH_TOKENS, num_requests),
            max_requests_per_batch=num_requests,
            safety_margin=0.0,  # the cache holds every request to its end
            allow_block_sharing=False,  # no prompts begin alike
        )


def make_runners(modes: Sequence[str], options: RunnerOptions) -> dict[str, Runner]:
    """Load the models and make the runners of ``modes``, in their order; transformers' share one target."""
    needs_transformers = any(mode in (STATIC, CONTINUOUS, ASSISTED) for mode in modes)
    model = _load_transformers(resolve_model(options.model, "target"), options.dtype) if needs_transformers else None
    runners: dict[str, Runner] = {}
    for mode in modes:
        if mode == TITAN:
            runners[mode] = TitanRunner(options, None)
        elif mode == TITAN_DRAFT:
            runners[mode] = TitanRunner(options, options.draft_model)
        elif mode == CONTINUOUS:
            runners[mode] = ContinuousRunner(model, options.max_model_len)
        elif mode == STATIC:
            runners[mode] = StaticRunner(model)
        else:
            runners[mode] = StaticRunner(model, _load_assistant(options))
    return runners


def allowed_modes(draft_model: str | None) -> list[str]:
    """Return the modes that are possible with this draft."""
    modes = [mode for mode in MODES if mode not in DRAFT_MODES]
    if draft_model is not None:
        modes.append(TITAN_DRAFT)
        if draft_model_config(draft_model) is not None:
            modes.append(ASSISTED)
    return [mode for mode in MODES if mode in modes]


def _load_transformers(folder: str, dtype: str) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    getLogger("ContinuousBatchingLogger").setLevel(ERROR)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[dtype]).eval()
    model.generation_config.eos_token_id = None  # the end of sequence is an ordinary token here, as with ignore_eos
    return model


def _load_assistant(options: RunnerOptions) -> Any:
    assert options.draft_model is not None
    assistant = _load_transformers(resolve_model(options.draft_model, "draft"), options.dtype)
    assistant.generation_config.num_assistant_tokens = options.max_draft_tokens
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    assistant.generation_config.assistant_confidence_threshold = 0.0  # always that many, as Titan's draft
    return assistant
