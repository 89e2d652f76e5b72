"""Loading of models from a folder or the Hugging Face hub: config, tokenizer, and weights streamed from safetensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from titan.kernels.interfaces import Backend
from titan.models.config import ModelConfig, as_token_ids
from titan.models.decoder import Decoder
from titan.models.registry import check_supported

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DEMO = "demo"
"""Name of the models that ship with the package."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
WEIGHT_DTYPES = {"F32", "BF16", "F16"}
"""Supported dtypes of safetensors files."""

CHUNK_BYTES = 8 * 2**20
"""Approximate size of the pieces in which weights are copied, so that few pages of a file are mapped at a time."""

GENERATION_CONFIG = "generation_config.json"
SAMPLING_DEFAULTS = {name: name for name in ("repetition_penalty", "temperature", "top_k", "top_p", "min_p")}
SAMPLING_DEFAULTS |= {"max_new_tokens": "max_tokens"}
"""Names in a generation config, and in `SamplingParams`."""
CONFIG_FILES = ["*.json"]
TOKENIZER_FILES = ["*.json", "*.txt", "*.model", "*.jinja"]
MAX_SHARED_NUMBERS = 2**24
"""Size of the largest weight whose place in memory is shared while it is packed; the allocator gives larger ones back at once."""

WEIGHT_FILES = ["*.json", "*.safetensors"]
WEIGHT_INDEX = "model.safetensors.index.json"
SINGLE_WEIGHT_FILE = "model.safetensors"


def resolve_model(name: str, role: Literal["target", "draft"]) -> str:
    """Return the folder of the demo model of this role, or any other name as it is."""
    return str(Path(__file__).resolve().parents[1] / "demo" / role) if name == DEMO else name


def resolve_dtype(dtype: str | torch.dtype, checkpoint: torch.dtype, backend: Backend) -> torch.dtype:
    """Return the dtype to run in.

    ``"auto"`` is the checkpoint's dtype, or float32 if the back end would emulate that.

    Raises:
        ValueError: a dtype other than auto, float32, bfloat16 and float16.
    """
    if dtype == "auto":
        return checkpoint if backend.supports(checkpoint) else torch.float32
    if isinstance(dtype, str) and dtype in DTYPES:
        return DTYPES[dtype]
    if isinstance(dtype, torch.dtype) and dtype in DTYPES.values():
        return dtype
    raise ValueError(f"dtype={dtype!r} is not allowed: it must be one of auto, {', '.join(DTYPES)}")


def load_config(path_or_id: str) -> ModelConfig:
    """Read the config of a model from a folder or a hub id.

    Raises:
        ValueError: the model does not exist, has no config, or is not supported.
    """
    return _read_config(_locate(path_or_id, CONFIG_FILES), path_or_id)


def load_sampling_defaults(path_or_id: str) -> dict[str, Any]:
    """Read what the generation_config.json of a model says about sampling, by the names of `SamplingParams`; empty without one.

    Raises:
        ValueError: the model does not exist, or the file is not a JSON object.
    """
    file = _locate(path_or_id, CONFIG_FILES) / GENERATION_CONFIG
    content = _read_json(file, path_or_id) if file.is_file() else {}
    return {ours: content[name] for name, ours in SAMPLING_DEFAULTS.items() if content.get(name) is not None}


def load_tokenizer(path_or_id: str) -> PreTrainedTokenizerBase:
    """Read the tokenizer of a model from a folder or a hub id.

    Raises:
        ValueError: the model does not exist, or has no tokenizer that can be read.
    """
    from transformers import AutoTokenizer

    folder = _locate(path_or_id, TOKENIZER_FILES)
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, ImportError) as error:
        raise ValueError(f"model {path_or_id!r} has no tokenizer that can be read: {error}") from error
    return tokenizer


def load_model(
    path_or_id: str, *, dtype: str | torch.dtype, backend: Backend, max_positions: int | None = None, pack: bool = True
) -> Decoder:
    """Read a model from a folder or a hub id, ready to run.

    The weights are streamed into the decoder piece by piece: besides them, only a few MiB of the files are mapped.

    Args:
        path_or_id: a folder with config.json and safetensors weights, or a hub id.
        dtype: "auto", "float32", "bfloat16", "float16" or the torch dtype; see `resolve_dtype`.
        backend: that runs the model.
        max_positions: positions that can be run; by default all that the model was trained for.
        pack: pack the weights where possible; see `Decoder.prepare`.

    Raises:
        ValueError: the model does not exist, is not supported, or has weights that do not fit its config.
    """
    from accelerate import init_empty_weights

    folder = _locate(path_or_id, WEIGHT_FILES)
    config = _read_config(folder, path_or_id)
    run_dtype = resolve_dtype(dtype, config.dtype, backend)
    with init_empty_weights(include_buffers=False):
        model = Decoder(config, dtype=run_dtype, backend=backend, max_positions=max_positions)
    destinations, tensors = destinations_of(model), _find_tensors(folder, path_or_id)
    _check_weights(destinations, tensors, config, path_or_id)
    _load_weights(model, destinations, tensors, pack)
    model.prepare(pack=pack)
    return model


def _locate(path_or_id: str, patterns: list[str]) -> Path:
    """Return the folder of a model, downloading the files that match ``patterns`` if it is a hub id."""
    folder = Path(path_or_id).expanduser()
    if path_or_id and folder.is_dir():
        return folder
    if not path_or_id or path_or_id.startswith((".", "/", "~")) or path_or_id.count("/") > 1:
        raise ValueError(f"model {path_or_id!r} does not exist: it must be {DEMO!r}, a folder or a Hugging Face hub id")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(path_or_id, allow_patterns=patterns))
    except GatedRepoError as error:
        raise ValueError(f"model {path_or_id!r} is gated: ask for access on its hub page, then run `hf auth login`") from error
    except RepositoryNotFoundError as error:
        raise ValueError(
            f"model {path_or_id!r} does not exist: it must be {DEMO!r}, a folder or a Hugging Face hub id "
            "(a private one needs `hf auth login`)"
        ) from error
    except (OSError, ValueError) as error:  # no network, a malformed id
        raise ValueError(f"model {path_or_id!r} is no folder, and it cannot be had from the Hugging Face hub: {error}") from error


def _read_config(folder: Path, name: str) -> ModelConfig:
    from transformers import AutoConfig

    content = _read_json(folder / "config.json", name)
    architecture = check_supported(content, name)
    generation = folder / GENERATION_CONFIG
    eos = as_token_ids(_read_json(generation, name).get("eos_token_id")) if generation.exists() else ()
    try:
        return ModelConfig.read(AutoConfig.from_pretrained(folder), architecture, eos or None)
    except ValueError as error:
        raise ValueError(f"model {name!r} has a config that cannot be used: {error}") from error


def _read_json(path: Path, name: str) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"model {name!r} has no {path.name}")
    try:
        content = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"model {name!r} has a {path.name} that is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"model {name!r} has a {path.name} that is not a JSON object")
    return content


@dataclass(frozen=True, slots=True)
class _StoredTensor:
    """Location of a tensor of the checkpoint."""

    file: Path
    shape: tuple[int, ...]


def _find_tensors(folder: Path, name: str) -> dict[str, _StoredTensor]:
    """Read the headers of all weight files; return the tensors by name."""
    from safetensors import SafetensorError, safe_open

    index = folder / WEIGHT_INDEX
    if index.is_file():
        files = sorted({folder / file for file in _read_json(index, name).get("weight_map", {}).values()})
    else:
        files = [folder / SINGLE_WEIGHT_FILE]
    tensors = {}
    for file in files:
        if not file.is_file():
            others = ", ".join(sorted(path.name for path in folder.glob("*.bin"))) or "none of another format"
            raise ValueError(
                f"model {name!r} has no weight file {file.name}: weights must be in {SINGLE_WEIGHT_FILE} "
                f"or in the files of {WEIGHT_INDEX} (found {others})"
            )
        try:
            with safe_open(file, framework="pt") as reader:
                for key in reader.keys():  # noqa: SIM118 (the reader is no mapping)
                    stored = reader.get_slice(key)
                    if stored.get_dtype() not in WEIGHT_DTYPES:
                        raise ValueError(
                            f"model {name!r} has weight {key!r} of dtype {stored.get_dtype()}, which is not supported: "
                            f"it must be one of {', '.join(sorted(WEIGHT_DTYPES))}"
                        )
                    tensors[key] = _StoredTensor(file, tuple(stored.get_shape()))
        except SafetensorError as error:
            raise ValueError(f"model {name!r} has a damaged weight file {file.name}: {error}") from error
    return tensors


@dataclass(frozen=True, slots=True)
class Destination:
    """The rows of a parameter that a tensor of the checkpoint fills."""

    owner: nn.Module
    parameter: str
    rows: slice
    shape: tuple[int, ...]  # that the checkpoint's tensor must have


def destinations_of(model: Decoder) -> dict[str, Destination]:
    """Return where each tensor of a checkpoint goes, by its name in transformers."""
    config = model.config
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    destinations: dict[str, Destination] = {}

    def whole(source: str, owner: nn.Module, parameter: str) -> None:
        shape = tuple(owner.get_parameter(parameter).shape)
        destinations[source] = Destination(owner, parameter, slice(0, shape[0]), shape)

    def stacked(prefix: str, owner: nn.Module, target: str, parts: Mapping[str, int]) -> None:
        for kind in ("weight", "bias"):
            parameter = f"{target}_{kind}"
            if parameter not in owner._parameters:
                continue
            columns = tuple(owner.get_parameter(parameter).shape[1:])
            first = 0
            for part, size in parts.items():
                rows = slice(first, first + size)
                destinations[f"{prefix}{part}.{kind}"] = Destination(owner, parameter, rows, (size, *columns))
                first += size

    whole("model.embed_tokens.weight", model, "embedding")
    whole("model.norm.weight", model, "final_norm")
    if model.lm_head is not None:
        whole("lm_head.weight", model, "lm_head")
    for i, layer in enumerate(model.layers):
        prefix = f"model.layers.{i}."
        whole(f"{prefix}input_layernorm.weight", layer, "input_norm")
        whole(f"{prefix}post_attention_layernorm.weight", layer, "post_norm")
        stacked(f"{prefix}self_attn.", layer, "qkv", {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size})
        stacked(f"{prefix}self_attn.", layer, "output", {"o_proj": config.hidden_size})
        stacked(f"{prefix}mlp.", layer, "gate_up", {"gate_proj": config.intermediate_size, "up_proj": config.intermediate_size})
        stacked(f"{prefix}mlp.", layer, "down", {"down_proj": config.hidden_size})
        if "qk_norm" in config.traits:
            q_rows, k_rows = slice(0, config.num_heads), slice(config.num_heads, None)
            for source, rows in (("q_norm", q_rows), ("k_norm", k_rows)):  # one weight for all heads
                destinations[f"{prefix}self_attn.{source}.weight"] = Destination(layer, "qk_norm", rows, (config.head_dim,))
    return destinations


def _check_weights(destinations: dict[str, Destination], tensors: dict[str, _StoredTensor], config: ModelConfig, name: str) -> None:
    """Raise a `ValueError` for missing, unexpected or wrongly shaped tensors."""
    is_tied = "tied_embedding" in config.traits
    ignored = {key for key in tensors if key.endswith("rotary_emb.inv_freq") or (is_tied and key == "lm_head.weight")}
    missing = sorted(destinations.keys() - tensors.keys())
    unexpected = sorted(tensors.keys() - destinations.keys() - ignored)
    if missing or unexpected:
        raise ValueError(
            f"model {name!r} has weights that do not fit {config.architecture}: "
            f"missing {_some(missing)}; unexpected {_some(unexpected)}"
        )
    for key, destination in destinations.items():
        if tensors[key].shape != destination.shape:
            raise ValueError(
                f"model {name!r} has weight {key!r} of shape {list(tensors[key].shape)}: "
                f"its config asks for {list(destination.shape)}"
            )


def _load_weights(model: Decoder, destinations: dict[str, Destination], tensors: dict[str, _StoredTensor], pack: bool) -> None:
    """Fill the parameters of an empty-initialised decoder one by one, and pack those that can be."""
    parts: dict[tuple[nn.Module, str], list[str]] = {}
    for key, destination in destinations.items():
        parts.setdefault((destination.owner, destination.parameter), []).append(key)

    def empty(num_elements: int) -> Tensor:
        return torch.empty(num_elements, dtype=model.dtype, device=model.device)

    packed = {part for part in parts if pack and model.ops.packs and model.is_packable(part[1])}
    # Plain weights that are to be packed share one buffer: freed one by one, they would leave holes in the heap that the
    # packed ones do not fit into, which adds up to a third of the model. Large ones leave none.
    sizes = [owner.get_parameter(parameter).numel() for owner, parameter in packed]
    buffer = empty(max((size for size in sizes if size <= MAX_SHARED_NUMBERS), default=0))
    for (owner, parameter), keys in parts.items():
        shape = owner.get_parameter(parameter).shape
        is_packed = (owner, parameter) in packed
        is_shared = is_packed and shape.numel() <= MAX_SHARED_NUMBERS
        value = (buffer[: shape.numel()] if is_shared else empty(shape.numel())).view(shape)
        for key in keys:
            _copy_tensor(value[destinations[key].rows], tensors[key], key)
        setattr(owner, parameter, nn.Parameter(model.ops.pack(value) if is_packed else value, requires_grad=False))
        del value


def _some(names: list[str], limit: int = 5) -> str:
    listed = ", ".join(names[:limit]) or "none"
    return f"{listed} and {len(names) - limit} more" if len(names) > limit else listed


def _copy_tensor(target: Tensor, tensor: _StoredTensor, key: str) -> None:
    """Copy a stored tensor piece by piece; one without the target's first dimension is broadcast along it."""
    if target.dim() > len(tensor.shape):
        target.copy_(_read_rows(tensor, key, slice(None)))
        return
    step = max(1, CHUNK_BYTES // max(1, target[:1].nbytes))
    for first in range(0, len(target), step):
        target[first : first + step].copy_(_read_rows(tensor, key, slice(first, first + step)))


def _read_rows(tensor: _StoredTensor, key: str, rows: slice) -> Tensor:
    """Map some rows of a stored tensor.

    The file is reopened each time, because pages that were read stay mapped, and count as memory of the process,
    as long as the file is open.
    """
    from safetensors import safe_open

    with safe_open(tensor.file, framework="pt") as reader:
        read: Tensor = reader.get_slice(key)[rows]
    return read
