"""OpenVINO GenAI, in its own environment: its continuous-batching pipeline, with or without a draft model.

Models are converted once, by optimum-intel, into the environment's folder.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PRECISIONS = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
CACHE_GIB = 2


def load(options: dict[str, Any]) -> OpenvinoPeer:
    """Convert what is not yet converted, and load it."""
    return OpenvinoPeer(options)


class OpenvinoPeer:
    """A pipeline whose requests are counted step by step."""

    def __init__(self, options: dict[str, Any]) -> None:
        import openvino_genai as genai

        precision = PRECISIONS[options["dtype"]]
        properties: dict[str, Any] = {
            "INFERENCE_PRECISION_HINT": precision,
            "KV_CACHE_PRECISION": precision,  # the default has 8 bits, which is other work
            "INFERENCE_NUM_THREADS": options["threads"],
        }
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = CACHE_GIB
        scheduler.max_num_seqs = options["max_batch_size"]
        scheduler.enable_prefix_caching = False
        target = convert(options["model"])
        self.max_draft_tokens = options["max_draft_tokens"] if options["draft_model"] else 0
        if options["draft_model"]:
            draft_properties = {"draft_model": genai.draft_model(convert(options["draft_model"]), "CPU", **properties)}
        else:
            draft_properties = {}
        self.pipeline = genai.ContinuousBatchingPipeline(target, scheduler, "CPU", properties | draft_properties)
        self.versions = {"openvino-genai": genai.__version__}
        self._num_requests = 0

    def run(self, requests: list[dict[str, Any]], concurrency: int) -> dict[str, Any]:
        """Run requests, as `serve.py` says."""
        import numpy as np
        import openvino as ov
        import openvino_genai as genai

        results: list[dict[str, Any]] = [{"token_ids": [], "first_token_seconds": None} for _ in requests]
        handles: dict[int, Any] = {}
        num_queued, num_steps = 0, 0
        start = time.perf_counter()
        while num_queued < len(requests) or handles:
            while len(handles) < concurrency and num_queued < len(requests):
                request = requests[num_queued]
                config = genai.GenerationConfig(max_new_tokens=request["output_len"], ignore_eos=True)
                config.set_eos_token_id(0)  # any: it is ignored, but must not be missing
                if self.max_draft_tokens:
                    config.num_assistant_tokens = self.max_draft_tokens
                prompt = ov.Tensor(np.array([request["prompt"]], dtype=np.int64))
                handles[num_queued] = self.pipeline.add_request(self._num_requests, prompt, config)
                self._num_requests, num_queued = self._num_requests + 1, num_queued + 1
            self.pipeline.step()
            now = time.perf_counter() - start
            for place, handle in list(handles.items()):
                result = results[place]
                if handle.can_read():
                    num_steps += 1
                    if result["first_token_seconds"] is None:
                        result["first_token_seconds"] = now
                    for output in handle.read().values():
                        result["token_ids"] += output.generated_ids
                if len(result["token_ids"]) >= requests[place]["output_len"]:
                    result["finished_seconds"] = now
                    del handles[place]
        num_tokens = sum(len(result["token_ids"]) for result in results)
        return {"seconds": time.perf_counter() - start, "requests": results, "mean_acceptance_length": num_tokens / num_steps}


def convert(model: str) -> str:
    """Convert a model unless that was done before; returns the folder of the converted one."""
    stamp = "".join(f"{path} {path.stat().st_mtime_ns}" for path in sorted(Path(model).glob("*"))) or model
    converted = Path(sys.prefix, "converted", hashlib.sha256(stamp.encode()).hexdigest()[:16])
    if not converted.exists():
        part = converted.with_suffix(".part")
        subprocess.run([sys.executable, __file__, model, str(part)], check=True, stdout=sys.stderr)  # gives its memory back
        part.replace(converted)
    return str(converted)


def write_converted(model: str, folder: str) -> None:
    """Convert a model; one without a tokenizer gets a made-up one of its size, as a pipeline with a draft insists on it."""
    import openvino as ov
    from openvino_tokenizers import convert_tokenizer
    from optimum.exporters.openvino import main_export
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast

    main_export(model, folder, task="text-generation-with-past", library_name="transformers", convert_tokenizer=False)
    if (Path(model) / "tokenizer.json").exists() or not Path(model).is_dir():
        tokenizer = AutoTokenizer.from_pretrained(model)
    else:
        names = [f"token{i}" for i in range(AutoConfig.from_pretrained(model).vocab_size)]
        words = Tokenizer(WordLevel({name: i for i, name in enumerate(names)}, unk_token=names[0]))
        words.pre_tokenizer = Whitespace()
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token=names[0])
    parts = convert_tokenizer(tokenizer, with_detokenizer=True)
    for name, part in zip(("openvino_tokenizer.xml", "openvino_detokenizer.xml"), parts, strict=True):
        ov.save_model(part, str(Path(folder, name)))


if __name__ == "__main__":
    write_converted(*sys.argv[1:])
