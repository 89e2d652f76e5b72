"""Loading of models from a folder or the Hugging Face hub: config, sampling defaults, weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from titan.core.checks import shown
from titan.core.dtypes import RUN_DTYPES
from titan.core.out_of_memory import is_out_of_memory
from titan.core.sampling_params import SamplingParams
from titan.kernels.interfaces import Backend, Model
from titan.models.config import DecoderConfig, ModelConfig, as_token_ids, check_entries
from titan.models.decoder import Decoder
from titan.models.decoder_weights import read_decoder
from titan.models.files import (
    CONFIG,
    CONFIG_FILES,
    GENERATION_CONFIG,
    WHAT_IS_READ,
    ModelFiles,
    no_model,
    one_line,
    some,
)
from titan.models.hf.calls import TRANSFORMERS_LOCK
from titan.models.hf.describe import TransformersConfig, describe, empty_model
from titan.models.hf.load import load_weights as load_modules
from titan.models.registry import NotNativeError, check_supported
from titan.models.token_order import TokenOrder
from titan.models.tokenizer import TOKENIZER_FILES
from titan.models.weight_files import find_tensors, weight_files, weights_dtype

SAMPLING_DEFAULTS = {name: name for name in ("repetition_penalty", "temperature", "top_k", "top_p", "min_p")}
SAMPLING_DEFAULTS |= {name: name for name in ("presence_penalty", "frequency_penalty")}  # not transformers', but vLLM's
SAMPLING_DEFAULTS |= {"max_new_tokens": "max_tokens"}
"""Names in a generation config, and in `SamplingParams`."""


def resolve_dtype(dtype: str | torch.dtype, checkpoint: torch.dtype | None, backend: Backend) -> torch.dtype:
    """Return the dtype to run in.

    ``"auto"`` is the checkpoint's dtype, or float32 if the back end would emulate that, or if that is not known.

    Raises:
        ValueError: a dtype other than auto, float32, bfloat16 and float16.
    """
    if dtype == "auto":
        return checkpoint if checkpoint is not None and backend.supports(checkpoint) else torch.float32
    if isinstance(dtype, str) and dtype in RUN_DTYPES:
        return RUN_DTYPES[dtype]
    if isinstance(dtype, torch.dtype) and dtype in RUN_DTYPES.values():
        return dtype
    raise ValueError(f"dtype={dtype!r} is not allowed: it must be one of auto, {', '.join(RUN_DTYPES)}")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model that can be run, as far as its config says; made by `open_model`."""

    files: ModelFiles
    config: ModelConfig  # a `DecoderConfig` if Titan's own decoder is to run it, else a `TransformersConfig`
    why_not_native: str | None = None  # what keeps it from Titan's own decoder; None where that runs it, or was not asked


def open_model(files: ModelFiles, model_impl: str = "auto", *, trust_remote_code: bool = False) -> Checkpoint:
    """Read the config of a model; nothing else is downloaded, but for code that is trusted.

    Raises:
        ValueError: the model does not exist, has no config, or is not supported.
    """
    content = read_config_file(files)
    name, folder = files.name, files.fetch(*CONFIG_FILES, *(["*.py"] if trust_remote_code else []))
    generation = files.read_json(GENERATION_CONFIG) if (folder / GENERATION_CONFIG).exists() else {}
    with _naming(name, GENERATION_CONFIG):
        eos_token_ids = as_token_ids(generation.get("eos_token_id")) or None
    with _naming(name, CONFIG), TRANSFORMERS_LOCK:
        check_entries(content)
        why_not_native = None
        if model_impl != "transformers":
            try:
                return Checkpoint(files, _read_decoder_config(content, folder, eos_token_ids))
            except NotNativeError as error:
                if model_impl == "native":
                    raise ValueError(
                        f"model_impl='native' is not allowed for this model: it must be 'auto' or 'transformers', since {error}"
                    ) from error
                why_not_native = str(error)
        check_type(content, trust_remote_code=trust_remote_code)
        from transformers import AutoConfig

        source = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        for each in (source, source.get_text_config()):
            if getattr(each, "quantization_config", None) == {}:  # which transformers would take for an unknown method
                each.quantization_config = None
        source._attn_implementation = None  # it may name one that is not installed, which would not be used
        return Checkpoint(files, describe(source, eos_token_ids, trust_remote_code=trust_remote_code), why_not_native)


def run_dtype(dtype: str | torch.dtype, checkpoint: Checkpoint, backend: Backend) -> torch.dtype:
    """Return the dtype to run a model in, see `resolve_dtype`; for "auto", its weights are asked if its config has none.

    Raises:
        ValueError: as `resolve_dtype`, or weights that are asked are missing or damaged.
    """
    stored = checkpoint.config.dtype
    if stored is None and dtype == "auto":
        stored = weights_dtype(checkpoint.files)
    return resolve_dtype(dtype, stored, backend)


def load_sampling_defaults(files: ModelFiles) -> SamplingParams:
    """Read what the generation_config.json of a model says about sampling; what it does not say is as in `SamplingParams`.

    Raises:
        ValueError: the model does not exist, or the file is not a JSON object, or has what is not allowed.
    """
    is_there = (files.fetch(*CONFIG_FILES) / GENERATION_CONFIG).is_file()
    content = files.read_json(GENERATION_CONFIG) if is_there else {}
    values = {ours: content[name] for name, ours in SAMPLING_DEFAULTS.items() if content.get(name) is not None}
    try:
        return SamplingParams(**values)
    except ValueError as error:
        raise ValueError(
            f"model {files.name!r} has a {GENERATION_CONFIG} that cannot be used: {error}; generation_config='vllm' does without it"
        ) from error


def download(path_or_id: str, revision: str | None, model_impl: str = "auto", *, trust_remote_code: bool = False) -> str:
    """Return the folder of a model, of one on the hub after downloading all that is read of it.

    Raises:
        ValueError: the model does not exist or is not supported.
    """
    files = ModelFiles(path_or_id, revision)
    open_model(files, model_impl, trust_remote_code=trust_remote_code)
    return str(files.fetch(*CONFIG_FILES, *TOKENIZER_FILES, *weight_files(files)))


def load_model(
    checkpoint: Checkpoint,
    *,
    dtype: str | torch.dtype,
    backend: Backend,
    order: TokenOrder | None = None,
    weight_bits: int | None = None,
    pack: bool = True,
    max_positions: int | None = None,
) -> Model:
    """Read the weights of a model, ready to run; of one on the hub, only those files are downloaded that are loaded.

    Args:
        checkpoint: from `open_model`.
        dtype: "auto", "float32", "bfloat16", "float16" or the torch dtype; see `run_dtype`.
        backend: that runs the model.
        order: of the tokens; ``None`` = the checkpoint's.
        weight_bits: 8 rounds the matrices of linear layers, where the back end's ``packs_8_bits``; for Titan's own decoder.
        pack: pack the weights of Titan's own decoder where possible, see `Decoder.prepare`.
        max_positions: that are run, for which memory is taken; ``None`` = all that the model has.

    Raises:
        ValueError: the model has weights that do not fit its config, or none.
    """
    files, config = checkpoint.files, checkpoint.config
    if max_positions is not None:
        config = replace(config, max_position_embeddings=min(config.max_position_embeddings, max_positions))
    dtype = run_dtype(dtype, checkpoint, backend)
    name, tensors = files.name, find_tensors(files)
    if isinstance(config, DecoderConfig):
        with _naming(name, "checkpoint"):
            return read_decoder(
                config, name, tensors, dtype=dtype, backend=backend, pack=pack, order=order, weight_bits=weight_bits
            )
    assert isinstance(config, TransformersConfig) and weight_bits is None
    with _naming(name, "checkpoint"), TRANSFORMERS_LOCK:
        return load_modules(name, files.fetch(), tensors, config, dtype=dtype, backend=backend, order=order)


def _read_decoder_config(content: dict[str, Any], folder: Path, eos_token_ids: tuple[int, ...] | None) -> DecoderConfig:
    architecture = check_supported(content)
    from transformers import AutoConfig

    return DecoderConfig.read(AutoConfig.from_pretrained(folder, trust_remote_code=False), architecture, eos_token_ids)


def how_it_runs(config: ModelConfig) -> str:
    """Return who computes a model's layers.

    "native" is Titan's decoder, "transformers" that library's modules over paged attention, and "gathered" such modules with an
    attention of their own, for which keys and values are gathered.
    """
    if "own_attention" in config.traits:
        return "gathered"
    return "transformers" if "transformers" in config.traits else "native"


def empty_modules(config: ModelConfig, backend: Backend) -> nn.Module:
    """Return the modules of a model without memory, which tell how many weights it has."""
    if isinstance(config, DecoderConfig):
        return Decoder(config, dtype=torch.float32, backend=backend)
    assert isinstance(config, TransformersConfig)
    with TRANSFORMERS_LOCK:
        model: nn.Module = empty_model(config.source, trust_remote_code=config.trust_remote_code)
    return model


def check_type(content: Mapping[str, Any], *, trust_remote_code: bool) -> None:
    """Refuse a model that transformers does not know, unless its code comes with it and is trusted.

    Raises:
        ValueError: names the type, and the code if there is any.
    """
    from transformers import __version__
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model_type, auto_map = content.get("model_type"), content.get("auto_map")
    if model_type in CONFIG_MAPPING or (auto_map and trust_remote_code):
        return
    unknown = f"model_type={model_type!r} is unknown to transformers {__version__}"
    if auto_map:
        raise ValueError(
            f"{unknown}, and auto_map={shown(auto_map)} names code of the checkpoint: allowed with trust_remote_code=True"
        )
    raise ValueError(f"{unknown}: allowed are its causal language models, or code in the checkpoint, which auto_map names")


def read_config_file(files: ModelFiles) -> dict[str, Any]:
    """Return what config.json holds, whether or not such a model is supported.

    Raises:
        ValueError: there is none, or it is not JSON.
    """
    if not (files.fetch(*CONFIG_FILES) / CONFIG).is_file():
        raise ValueError(no_model(files) or f"model {files.name!r} has no {CONFIG} (found {some(files.names())}): {WHAT_IS_READ}")
    return files.read_json(CONFIG)


@contextmanager
def _naming(name: str, file: str) -> Iterator[None]:
    """Add to an error which model and file it is about."""
    try:
        yield
    except Exception as error:  # transformers raises whatever the damage leads to
        if is_out_of_memory(error):
            raise
        raise ValueError(f"model {name!r} has a {file} that cannot be used: {one_line(error)}") from error
