"""transformers: `generate` over static batches, assisted generation, or continuous batching, as the option ``mode`` says.

A static batch runs until its longest request has all its tokens; prompts of several lengths are padded on the left.
"""

from __future__ import annotations

import logging
import time
from typing import Any

PAGE_SIZE = 256  # tokens, the default of transformers
MAX_BATCH_TOKENS = 512  # per step; a longer step costs more, as each token attends to the whole cache under a mask


def load(options: dict[str, Any]) -> StaticPeer | ContinuousPeer:
    """Load the models that ``options["mode"]``, "static", "assisted" or "continuous", needs."""
    import torch

    torch.set_num_threads(options["threads"])
    model = load_model(options["model"], options)
    if options["mode"] == "continuous":
        return ContinuousPeer(model, options["max_model_len"])
    assistant = None
    if options["mode"] == "assisted":
        assistant = load_model(options["draft_model"], options)
        assistant.generation_config.num_assistant_tokens = options["max_draft_tokens"]
        assistant.generation_config.num_assistant_tokens_schedule = "constant"
        assistant.generation_config.assistant_confidence_threshold = 0.0  # always that many, as Titan's draft
    return StaticPeer(model, assistant)


def load_model(folder: str, options: dict[str, Any]) -> Any:
    """Load a model that goes on after an end of sequence."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, options["dtype"])).eval().to(options["device"])
    model.generation_config.eos_token_id = None
    return model


def versions() -> dict[str, str]:
    """What runs here."""
    import torch
    import transformers

    return {"transformers": transformers.__version__, "torch": torch.__version__}


class StaticPeer:
    """`generate` over batches of ``concurrency`` prompts; with an assistant, over one prompt after the other."""

    def __init__(self, model: Any, assistant: Any = None) -> None:
        self.model = model
        self.assistant = assistant
        self.versions = versions()
        self._num_forwards = 0
        self._first_token_time = 0.0
        model.register_forward_hook(self._count)

    def run(self, requests: list[dict[str, Any]], concurrency: int) -> dict[str, Any]:
        """Run requests, as `serve.py` says."""
        results: list[dict[str, Any]] = []
        self._num_forwards = 0
        batch_size = concurrency if self.assistant is None else 1
        start = time.perf_counter()
        for first in range(0, len(requests), batch_size):
            batch = requests[first : first + batch_size]
            self._first_token_time = 0.0
            token_ids = self._generate(batch)
            finished = time.perf_counter() - start
            for request, tokens in zip(batch, token_ids, strict=True):
                results.append(
                    {
                        "token_ids": tokens[: request["output_len"]],
                        "first_token_seconds": self._first_token_time - start,
                        "finished_seconds": finished,
                    }
                )
        seconds = time.perf_counter() - start
        num_tokens = sum(request["output_len"] for request in requests)
        length = None if self.assistant is None else num_tokens / self._num_forwards
        return {"seconds": seconds, "requests": results, "mean_acceptance_length": length}

    def _generate(self, batch: list[dict[str, Any]]) -> list[list[int]]:
        import torch

        longest = max(len(request["prompt"]) for request in batch)
        pads = [longest - len(request["prompt"]) for request in batch]
        padded = [[0] * pad + request["prompt"] for pad, request in zip(pads, batch, strict=True)]
        prompts = torch.tensor(padded, device=self.model.device)
        mask = torch.tensor([[0] * pad + [1] * (longest - pad) for pad in pads], device=self.model.device)
        options: dict[str, Any] = {} if self.assistant is None else {"assistant_model": self.assistant}
        num_new = max(request["output_len"] for request in batch)
        output = self.model.generate(
            prompts, attention_mask=mask, do_sample=False, max_new_tokens=num_new, pad_token_id=0, **options
        )
        token_ids: list[list[int]] = output[:, longest:].tolist()
        return token_ids

    def _count(self, *_: Any) -> None:
        self._num_forwards += 1
        if not self._first_token_time:
            self._first_token_time = time.perf_counter()


class ContinuousPeer:
    """Continuous batching, with a cache that holds every running request; its manager lives on while ``concurrency`` stays.

    The clock stops when the last request is finished, before the manager winds down.
    """

    def __init__(self, model: Any, max_model_len: int) -> None:
        self.model = model
        self.pages_per_request = -(-max_model_len // PAGE_SIZE)
        self.versions = versions()
        self._concurrency = 0

    def run(self, requests: list[dict[str, Any]], concurrency: int) -> dict[str, Any]:
        """Run requests, as `serve.py` says.

        Raises:
            RuntimeError: a request failed.
        """
        from transformers import GenerationConfig

        config = self._batching_config(concurrency)
        generation = GenerationConfig(do_sample=False, eos_token_id=-1)
        options = {"generation_config": generation, "continuous_batching_config": config, "persistent_manager": True}
        outputs: dict[str, Any] = {}
        start = time.perf_counter()
        with self.model.continuous_batching_context_manager(**options) as manager:
            ids = [
                manager.add_request(request["prompt"], max_new_tokens=request["output_len"], record_timestamps=True)
                for request in requests
            ]
            while len(outputs) < len(ids):
                output = manager.get_result(timeout=1)
                if output is not None and output.is_finished():
                    outputs[output.request_id] = output
                elif output is None and not manager.is_running():
                    raise RuntimeError("the generation thread ended")
        errors = [output.error for output in outputs.values() if output.error is not None]
        if errors:
            raise RuntimeError(f"continuous batching failed: {errors}")
        seconds = max(output.lifespan[1] for output in outputs.values()) - start  # the end of its thread takes 0.2 s more
        results = [
            {
                "token_ids": outputs[request_id].generated_tokens,
                "first_token_seconds": outputs[request_id].timestamps[0] - start,
                "finished_seconds": outputs[request_id].lifespan[1] - start,
            }
            for request_id in ids
        ]
        return {"seconds": seconds, "requests": results, "mean_acceptance_length": None}

    def _batching_config(self, concurrency: int) -> Any:
        """Return the options for this many requests; a manager made for another number goes."""
        from transformers import ContinuousBatchingConfig

        if concurrency != self._concurrency:
            self.model.destroy_cached_continuous_batching_manager()
            self._concurrency = concurrency
        return ContinuousBatchingConfig(
            page_size=PAGE_SIZE,
            num_blocks=concurrency * self.pages_per_request + 1,
            max_batch_tokens=max(MAX_BATCH_TOKENS, concurrency),
            max_requests_per_batch=concurrency,
            safety_margin=0.0,  # the cache holds every request to its end
            allow_block_sharing=False,  # no prompts begin alike
        )
