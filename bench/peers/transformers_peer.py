"""transformers: `generate` over static batches, assisted generation, or continuous batching, as the option ``mode`` says.

A static batch runs until its longest request has all its tokens; prompts of several lengths are padded on the left.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

VERSIONS = {"transformers": transformers.__version__}
PAGE_SIZE = 256  # tokens, the default of transformers
MAX_BATCH_TOKENS = 512  # per step; a longer step costs more, as each token attends to the whole cache under a mask


def load(options: dict[str, Any]) -> StaticPeer | ContinuousPeer:
    """Load the models that ``options["mode"]``, "static", "assisted" or "continuous", needs."""
    torch.set_num_threads(options["threads"])
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    model = _load_model(options["model"], options)
    if options["mode"] == "continuous":
        return ContinuousPeer(model, options["max_model_len"])
    if options["mode"] == "static":
        return StaticPeer(model)
    assistant = _load_model(options["draft_model"], options)
    assistant.generation_config.num_assistant_tokens = options["max_draft_tokens"]
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    assistant.generation_config.assistant_confidence_threshold = 0.0  # always that many, as Titan's draft
    return StaticPeer(model, assistant)


def _load_model(folder: str, options: dict[str, Any]) -> Any:
    dtype = getattr(torch, options["dtype"])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, trust_remote_code=False).eval().to(options["device"])
    model.generation_config.eos_token_id = None  # it goes on after an end of sequence
    return model


class StaticPeer:
    """`generate` over batches of ``concurrency`` prompts; with an assistant, over one prompt after the other."""

    versions = VERSIONS

    def __init__(self, model: Any, assistant: Any = None) -> None:
        self.model = model
        self.assistant = assistant
        self._forward_ends: list[float] = []
        model.register_forward_hook(lambda *_: self._forward_ends.append(time.perf_counter()))

    def run(self, requests: list[dict[str, Any]], concurrency: int) -> dict[str, Any]:
        """Run requests, as `serve.py` says."""
        results: list[dict[str, Any]] = []
        self._forward_ends.clear()
        batch_size = concurrency if self.assistant is None else 1
        start = time.perf_counter()
        for first in range(0, len(requests), batch_size):
            batch = requests[first : first + batch_size]
            num_forwards = len(self._forward_ends)
            outputs = self._generate(batch)
            times = {
                "first_token_seconds": self._forward_ends[num_forwards] - start,
                "finished_seconds": time.perf_counter() - start,
            }
            results += [{"token_ids": tokens[: each["output_len"]], **times} for each, tokens in zip(batch, outputs, strict=True)]
        seconds = time.perf_counter() - start
        num_tokens = sum(request["output_len"] for request in requests)
        figures = {} if self.assistant is None else {"tokens/step": num_tokens / len(self._forward_ends)}
        return {"seconds": seconds, "requests": results, "figures": figures}

    def _generate(self, batch: list[dict[str, Any]]) -> list[list[int]]:
        longest = max(len(request["prompt"]) for request in batch)
        pads = [longest - len(request["prompt"]) for request in batch]
        output = self.model.generate(
            torch.tensor([[0] * pad + request["prompt"] for pad, request in zip(pads, batch, strict=True)]).to(self.model.device),
            attention_mask=torch.tensor([[0] * pad + [1] * (longest - pad) for pad in pads]).to(self.model.device),
            do_sample=False,
            max_new_tokens=max(request["output_len"] for request in batch),
            pad_token_id=0,
            assistant_model=self.assistant,
        )
        token_ids: list[list[int]] = output[:, longest:].tolist()
        return token_ids


class ContinuousPeer:
    """Continuous batching, with a cache that holds every running request; its manager lives on while ``concurrency`` stays."""

    versions = VERSIONS

    def __init__(self, model: Any, max_model_len: int) -> None:
        self.model = model
        self.pages_per_request = -(-max_model_len // PAGE_SIZE)
        self._concurrency = 0

    def run(self, requests: list[dict[str, Any]], concurrency: int) -> dict[str, Any]:
        """Run requests, as `serve.py` says.

        Raises:
            RuntimeError: a request failed.
        """
        if concurrency != self._concurrency:
            self.model.destroy_cached_continuous_batching_manager()
            self._concurrency = concurrency
        batching = ContinuousBatchingConfig(
            page_size=PAGE_SIZE,
            num_blocks=concurrency * self.pages_per_request + 1,
            max_batch_tokens=max(MAX_BATCH_TOKENS, concurrency),
            max_requests_per_batch=concurrency,
            safety_margin=0.0,  # the cache holds every request to its end
            allow_block_sharing=False,  # no prompts begin alike
        )
        generation = GenerationConfig(do_sample=False, eos_token_id=-1)
        results: dict[str, dict[str, Any]] = {}
        start = time.perf_counter()
        with self.model.continuous_batching_context_manager(
            generation, continuous_batching_config=batching, persistent_manager=True
        ) as manager:
            ids = [
                manager.add_request(each["prompt"], max_new_tokens=each["output_len"], record_timestamps=True) for each in requests
            ]
            while len(results) < len(ids):
                output = manager.get_result(timeout=1)
                if output is None:
                    if not manager.is_running():
                        raise RuntimeError("the generation thread ended")
                elif output.error is not None:
                    raise RuntimeError(f"continuous batching failed: {output.error}")
                elif output.is_finished():
                    results[output.request_id] = {
                        "token_ids": output.generated_tokens,
                        "first_token_seconds": output.timestamps[0] - start,
                        "finished_seconds": output.lifespan[1] - start,
                    }
        seconds = max(result["finished_seconds"] for result in results.values())  # the end of its thread takes 0.2 s more
        return {"seconds": seconds, "requests": [results[request_id] for request_id in ids], "figures": {}}
