"""OpenVINO GenAI, in its own environment: its continuous-batching pipeline, with or without a draft model.

Models are converted once, by optimum-intel, into the environment's folder.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai

PRECISIONS = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}


class OpenvinoPeer:
    """A pipeline for `serve.run_steps`; models that are not yet converted are.

    Raises:
        ValueError: the device is not the CPU.
    """

    versions = {"openvino-genai": genai.__version__}  # noqa: RUF012 - nobody changes it

    def __init__(self, options: dict[str, Any]) -> None:
        if options["device"] != "cpu":
            raise ValueError(f"device={options['device']} is not that of OpenVINO here: allowed is cpu")
        precision = PRECISIONS[options["dtype"]]
        properties: dict[str, Any] = {
            "INFERENCE_PRECISION_HINT": precision,
            "KV_CACHE_PRECISION": precision,  # the default has 8 bits, which is other work
            "INFERENCE_NUM_THREADS": options["threads"],
        }
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = 2  # GiB
        scheduler.max_num_seqs = options["max_batch_size"]
        scheduler.max_num_batched_tokens = options["max_num_batched_tokens"]
        scheduler.enable_prefix_caching = False
        target = convert(options["model"])
        self.max_draft_tokens = options["max_draft_tokens"] if options["draft_model"] else 0
        draft = {}
        if options["draft_model"]:
            draft = {"draft_model": genai.draft_model(convert(options["draft_model"]), "CPU", **properties)}
        self.pipeline = genai.ContinuousBatchingPipeline(target, scheduler, "CPU", properties | draft)
        self._ids = count()

    def add(self, request: dict[str, Any]) -> Any:
        """Queue a request; returns its handle."""
        config = genai.GenerationConfig(max_new_tokens=request["output_len"], ignore_eos=True)
        config.set_eos_token_id(0)  # any: it is ignored, but must not be missing
        if self.max_draft_tokens:
            config.num_assistant_tokens = self.max_draft_tokens
        return self.pipeline.add_request(next(self._ids), ov.Tensor(np.array([request["prompt"]], dtype=np.int64)), config)

    def step(self, handles: list[Any]) -> list[tuple[Any, list[int]]]:
        """Take a step; returns handles with their new tokens."""
        self.pipeline.step()
        return [
            (handle, [token for output in handle.read().values() for token in output.generated_ids])
            for handle in handles
            if handle.can_read()
        ]


def convert(model: str) -> str:
    """Convert a model unless that was done before; returns the folder of the converted one."""
    stamp = "".join(f"{path} {path.stat().st_mtime_ns}" for path in sorted(Path(model).glob("*"))) or model
    converted = Path(sys.prefix, "converted", hashlib.sha256(stamp.encode()).hexdigest()[:16])
    if not converted.exists():
        part = converted.with_suffix(".part")
        subprocess.run([sys.executable, "-I", __file__, model, part], check=True, stdout=sys.stderr)  # gives its memory back
        part.replace(converted)
    return str(converted)


def write_converted(model: str, folder: str) -> None:
    """Convert a model, with a tokenizer of one word, as a pipeline with a draft insists on having one."""
    from openvino_tokenizers import convert_tokenizer
    from optimum.exporters.openvino import main_export
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    main_export(model, folder, task="text-generation-with-past", library_name="transformers", convert_tokenizer=False)
    words = Tokenizer(WordLevel({"word": 0}, unk_token="word"))
    words.pre_tokenizer = Whitespace()
    tokenizer = convert_tokenizer(PreTrainedTokenizerFast(tokenizer_object=words, unk_token="word"))
    ov.save_model(tokenizer, Path(folder, "openvino_tokenizer.xml"))


load = OpenvinoPeer

if __name__ == "__main__":
    write_converted(*sys.argv[1:])
