"""Loading of models of transformers: their weights, and who attends in them."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from titan.core.kv_tensor import KVTensor
from titan.kernels.interfaces import Backend
from titan.models.hf.calls import quiet
from titan.models.hf.composite import is_composite
from titan.models.hf.describe import TransformersConfig, empty_model
from titan.models.hf.experts import GROUPED, set_experts
from titan.models.hf.gathered import GatheredAttention, check_gathering
from titan.models.hf.head import find_attending, find_decoder
from titan.models.hf.model import CHECKED_SLOTS, TransformersModel
from titan.models.hf.paged import IMPLEMENTATION, PagedAttention
from titan.models.hf.process_heap import give_back
from titan.models.hf.quantised import cast_unquantised, mixes_rows, num_bytes, plain_tensors, quantisation
from titan.models.hf.trial_pass import check_rows
from titan.models.token_order import TokenOrder
from titan.models.weight_files import (
    MISSHAPEN,
    MISSING,
    STORED_DTYPES,
    UNEXPECTED,
    Shape,
    StoredTensor,
    check_dtypes,
    copy_mapped,
    misfits,
    not_finite,
    refuse_misfits,
)

LOG = logging.getLogger(__name__)

EXPERT = re.compile(r"(.*\bexperts)\.(\d+)\.(.+)")
"""A tensor of one expert: the list, its place in it, and its name there."""

WITH_STORED_MASKS, STORED_MASK = ("gpt2", "gptj", "codegen"), re.compile(r"\battn\.(bias|masked_bias|causal_mask)$")
"""Models with whose weights old versions of transformers stored masks, and the names of these."""

MAX_GROWTH = 1.2
"""Size of quantised weights in memory, relative to their files, above which they are said to be dequantised."""


def load_weights(
    name: str,
    folder: Path,
    tensors: Mapping[str, StoredTensor],
    config: TransformersConfig,
    *,
    dtype: torch.dtype,
    backend: Backend,
    order: TokenOrder | None,
) -> TransformersModel:
    """Load a model whose config has been described.

    Raises:
        ValueError: weights are missing, surplus, of other shapes than the config asks for, or not finite.
    """
    if (found := quantisation(config.source)) is not None:
        model = _read_quantised(folder, config, dtype, backend)
    else:
        check_dtypes(tensors, STORED_DTYPES)
        model = _read({name: replace(each, run_dtype=dtype) for name, each in tensors.items()}, config, dtype, backend)
    sizes = num_bytes(model), sum(map(len, {each.file for each in tensors.values()}))
    if not backend.layer_ops(dtype, config.traits).packs:  # weights stay as they are, some of them in modules that hide them
        copy_mapped(model, tensors)
    attending = _bind(model, config, dtype)
    loaded = TransformersModel(model, config, attending, dtype=dtype, backend=backend, order=order)
    if isinstance(attending, GatheredAttention):
        check_gathering(loaded, model, order)
    elif config.runs_own_code:  # transformers' own modules are held to it by tests
        check_rows(find_decoder(model), attending, loaded.ops, KVTensor(loaded.kv_layout, 1, CHECKED_SLOTS, loaded.device))
    copy_mapped(model, tensors)
    _say_what_differs(name, config, found, *sizes)
    return loaded


def _read(stored: dict[str, StoredTensor], config: TransformersConfig, dtype: torch.dtype, backend: Backend) -> Any:
    """Return a model of transformers with its weights, on the device of a back end; in float32, some may be of 16 bits."""
    if not is_composite(config.source):  # which may have experts of images in the same list, of another shape
        _check_experts(stored, config.architecture)
    model = _from_pretrained(None, config, dtype, backend, state_dict=stored)
    give_back()
    return model


def _read_quantised(folder: Path, config: TransformersConfig, dtype: torch.dtype, backend: Backend) -> Any:
    """Return a quantised model of transformers, with the dtype of what is not quantised, on the device of a back end."""
    model = _from_pretrained(folder, config, dtype, backend, use_safetensors=True)
    for name, weight in plain_tensors(model):
        if weight.is_floating_point() and not weight.isfinite().all():
            raise not_finite(name, weight.dtype)
    cast_unquantised(model, empty_model(config.source, trust_remote_code=config.trust_remote_code), dtype)
    with quiet(), torch.no_grad():  # compressed-tensors decompresses in the first pass of the whole model
        model(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=backend.device), use_cache=False)
    return model


def _from_pretrained(folder: Path | None, config: TransformersConfig, dtype: torch.dtype, backend: Backend, **options: Any) -> Any:
    with quiet():
        model, report = config.model_class.from_pretrained(
            folder,
            config=deepcopy(config.source),
            dtype=dtype,
            device_map=None if backend.is_host else {"": backend.device},
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # these are in the report
            **options,
        )
    _check_report(report, config)
    return model.eval().requires_grad_(False)


def _bind(model: Any, config: TransformersConfig, dtype: torch.dtype) -> PagedAttention | GatheredAttention:
    """Give a model its attention over paged KV."""
    if "own_attention" in config.traits:
        return GatheredAttention(dtype)
    find_attending(model).set_attn_implementation(IMPLEMENTATION)
    set_experts(model, GROUPED)
    return PagedAttention(model, config.modules, dtype)


def _say_what_differs(
    name: str, config: TransformersConfig, found: Mapping[str, Any] | None, in_memory: int, in_files: int
) -> None:
    """Warn of what a model does otherwise than its checkpoint makes expect, given its quantisation and the sizes of its weights."""
    if is_composite(config.source):
        LOG.warning("model %r runs text-only: of %s, only the language model is loaded", name, config.architecture)
    if found is not None and in_memory > MAX_GROWTH * in_files:
        method, sizes = found.get("quant_method"), (f"{size / 2**20:,.1f} MiB" for size in (in_memory, in_files))
        LOG.warning("model %r is dequantised at load (%s): its weights take %s, in files %s", name, method, *sizes)
    if found is not None and mixes_rows(found):
        LOG.warning(
            "model %r has load_in_8bit with llm_int8_threshold above 0: its rounding depends on all tokens of a pass, and so may "
            "its output, on drafts and on other requests; 0 ends that",
            name,
        )


def _check_report(report: Mapping[str, Any], config: TransformersConfig) -> None:
    shapes = [f"{key} ({list(found)}, not {list(asked)})" for key, found, asked in report["mismatched_keys"]]
    unexpected = [key for key in report["unexpected_keys"] if not _may_be_left_over(key, config.source.get_text_config())]
    refuse_misfits({MISSING: report["missing_keys"], UNEXPECTED: unexpected, MISSHAPEN: shapes}, config.architecture)


def _may_be_left_over(name: str, text_config: Any) -> bool:
    """Whether a weight that a model has no place for is a stored mask, or of the layers that predict further tokens."""
    if (layer := re.search(r"\blayers\.(\d+)\.", name)) is None:
        return text_config.model_type in WITH_STORED_MASKS and STORED_MASK.search(name) is not None
    num_layers: int = text_config.num_hidden_layers
    num_further: int = getattr(text_config, "num_nextn_predict_layers", None) or 0
    return num_layers <= int(layer[1]) < num_layers + num_further


def _check_experts(stored: Mapping[str, StoredTensor], architecture: str) -> None:
    """Refuse lists of experts with gaps or of several shapes: transformers stacks what it finds, in the order of the numbers."""
    shapes: dict[tuple[str, str], dict[int, Shape]] = {}
    for name, tensor in stored.items():
        if (found := EXPERT.fullmatch(name)) is not None:
            shapes.setdefault((found[1], found[3]), {})[int(found[2])] = tensor.shape
    asked = {
        f"{path}.{i}.{name}": Counter(each.values()).most_common(1)[0][0]
        for (path, name), each in shapes.items()
        for i in range(len(each))
    }
    refuse_misfits(misfits({name: stored[name].shape for name in asked.keys() & stored.keys()}, asked), architecture)
