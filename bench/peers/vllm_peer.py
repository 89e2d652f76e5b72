"""vLLM, in its own environment: continuous batching through the engine's step loop, with or without a draft model."""

from __future__ import annotations

import os
import time
from typing import Any

BLOCK_SIZE = 16  # tokens
CACHE_GIB = 4


def load(options: dict[str, Any]) -> VllmPeer:
    """Load the models; the engine runs in this process, so that a pause of the process pauses all of it."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(CACHE_GIB)
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    return VllmPeer(options)


class VllmPeer:
    """An engine whose requests are counted step by step."""

    def __init__(self, options: dict[str, Any]) -> None:
        import torch
        import vllm

        torch.set_num_threads(options["threads"])
        draft = options["draft_model"]
        speculation = {"method": "draft_model", "model": draft, "num_speculative_tokens": options["max_draft_tokens"]}
        engine_args = vllm.EngineArgs(
            model=options["model"],
            dtype=options["dtype"],
            skip_tokenizer_init=True,
            max_num_seqs=options["max_batch_size"],
            max_model_len=options["max_model_len"] + (options["max_draft_tokens"] if draft else 0),
            enable_prefix_caching=False,
            speculative_config=speculation if draft else None,
            disable_log_stats=True,
        )
        self.engine = vllm.LLMEngine.from_engine_args(engine_args)
        self.versions = {"vllm": vllm.__version__, "torch": torch.__version__}
        self._num_requests = 0

    def run(self, requests: list[dict[str, Any]], concurrency: int) -> dict[str, Any]:
        """Run requests, as `serve.py` says."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        results: list[dict[str, Any]] = [{"token_ids": [], "first_token_seconds": None} for _ in requests]
        places: dict[str, int] = {}
        num_queued, num_running, num_steps = 0, 0, 0
        start = time.perf_counter()
        while num_queued < len(requests) or num_running:
            while num_running < concurrency and num_queued < len(requests):
                request = requests[num_queued]
                params = SamplingParams(
                    temperature=0.0,
                    max_tokens=request["output_len"],
                    ignore_eos=True,
                    detokenize=False,
                    output_kind=RequestOutputKind.DELTA,
                )
                request_id = str(self._num_requests)
                self.engine.add_request(request_id, {"prompt_token_ids": request["prompt"]}, params)
                places[request_id] = num_queued
                self._num_requests, num_queued, num_running = self._num_requests + 1, num_queued + 1, num_running + 1
            outputs = self.engine.step()
            now = time.perf_counter() - start
            for output in outputs:
                result = results[places[output.request_id]]
                result["token_ids"] += output.outputs[0].token_ids
                num_steps += 1
                if result["first_token_seconds"] is None:
                    result["first_token_seconds"] = now
                if output.finished:
                    result["finished_seconds"] = now
                    num_running -= 1
        num_tokens = sum(len(result["token_ids"]) for result in results)
        return {"seconds": time.perf_counter() - start, "requests": results, "mean_acceptance_length": num_tokens / num_steps}
