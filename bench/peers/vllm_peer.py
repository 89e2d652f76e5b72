"""vLLM, in its own environment: continuous batching through the engine's step loop, with or without a draft model."""

from __future__ import annotations

import os
from itertools import count
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs in this process, so that a pause of it pauses all
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "4",  # GiB
    "VLLM_NO_USAGE_STATS": "1",
}

import torch
import vllm
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind


class VllmPeer:
    """An engine for `serve.run_steps`.

    Raises:
        ValueError: the device is not the one that this build of vLLM runs on.
    """

    versions = {"vllm": vllm.__version__, "torch of vllm": torch.__version__}  # noqa: RUF012 - nobody changes it

    def __init__(self, options: dict[str, Any]) -> None:
        own = "cpu" if current_platform.is_cpu() else "cuda:0"
        if options["device"] != own:
            raise ValueError(f"device={options['device']} is not that of this build of vLLM: allowed is {own}")
        torch.set_num_threads(options["threads"])
        draft = options["draft_model"]
        speculation = {"method": "draft_model", "model": draft, "num_speculative_tokens": options["max_draft_tokens"]}
        engine_args = vllm.EngineArgs(
            model=options["model"],
            dtype=options["dtype"],
            skip_tokenizer_init=True,
            max_num_seqs=options["max_batch_size"],
            max_num_batched_tokens=options["max_num_batched_tokens"],
            max_model_len=options["max_model_len"] + (options["max_draft_tokens"] if draft else 0),
            enable_prefix_caching=False,
            speculative_config=speculation if draft else None,
            disable_log_stats=True,
        )
        self.engine = vllm.LLMEngine.from_engine_args(engine_args)
        self._ids = map(str, count())

    def add(self, request: dict[str, Any]) -> str:
        """Queue a request; returns its id."""
        params = vllm.SamplingParams(
            temperature=0.0,
            max_tokens=request["output_len"],
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        request_id = next(self._ids)
        self.engine.add_request(request_id, {"prompt_token_ids": request["prompt"]}, params)
        return request_id

    def step(self, _: list[str]) -> list[tuple[str, list[int]]]:
        """Take a step; returns ids of requests with their new tokens."""
        return [(output.request_id, list(output.outputs[0].token_ids)) for output in self.engine.step()]


load = VllmPeer
