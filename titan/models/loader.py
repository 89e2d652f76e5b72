"""Loading of models from a folder or the Hugging Face hub: config, tokenizer, and weights streamed from safetensors."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from titan.core.checks import shown
from titan.kernels.interfaces import Backend
from titan.models.config import ModelConfig, as_token_ids, check_fields
from titan.models.decoder import Decoder, TokenOrder
from titan.models.files import WHAT_IS_READ, ModelFiles, one_line
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

SAMPLING_DEFAULTS = {name: name for name in ("repetition_penalty", "temperature", "top_k", "top_p", "min_p")}
SAMPLING_DEFAULTS |= {"max_new_tokens": "max_tokens"}
"""Names in a generation config, and in `SamplingParams`."""
MAX_SHARED_NUMBERS = 2**24
"""Size of the largest weight whose place in memory is shared while it is packed; the allocator gives larger ones back at once."""

CONFIG, GENERATION_CONFIG, ADAPTER_CONFIG = "config.json", "generation_config.json", "adapter_config.json"
WEIGHT_INDEX = "model.safetensors.index.json"
SINGLE_WEIGHT_FILE = "model.safetensors"
TOKENIZER_CONFIG = "tokenizer_config.json"
CONFIG_FILES = (CONFIG, GENERATION_CONFIG, ADAPTER_CONFIG, WEIGHT_INDEX)
"""Small files, which say what else is read."""

TOKENIZER_FILES = ("*.json", "*.txt", "*.model", "*.jinja")
TOKENIZER_SIGNS = ("tokenizer*", "vocab.*", "merges.txt", "spiece.model")
"""Files of which a folder with a tokenizer has at least one."""

_TRANSFORMERS_LOCK = threading.Lock()
"""Held while configs and tokenizers are read: the lazy imports of transformers fail in threads that run into each other."""


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


def load_config(path_or_id: str, revision: str | None = None, download_dir: str | None = None) -> ModelConfig:
    """Read the config of a model from a folder or a hub id; nothing else is downloaded.

    Args:
        path_or_id: a folder or hub id.
        revision: branch, tag or commit on the hub; ``None`` = its main branch.
        download_dir: folder for downloads; ``None`` = the hub library's cache.

    Raises:
        ValueError: the model does not exist, has no config, or is not supported.
    """
    return read_config(ModelFiles(path_or_id, revision, download_dir))


def load_sampling_defaults(path_or_id: str, revision: str | None = None, download_dir: str | None = None) -> dict[str, Any]:
    """Read what the generation_config.json of a model says about sampling, by the names of `SamplingParams`; empty without one.

    Args:
        path_or_id: a folder or hub id.
        revision: as in `load_config`.
        download_dir: as in `load_config`.

    Raises:
        ValueError: the model does not exist, or the file is not a JSON object.
    """
    files = ModelFiles(path_or_id, revision, download_dir)
    is_there = (files.fetch(GENERATION_CONFIG) / GENERATION_CONFIG).is_file()
    content = files.read_json(GENERATION_CONFIG) if is_there else {}
    return {ours: content[name] for name, ours in SAMPLING_DEFAULTS.items() if content.get(name) is not None}


def load_tokenizer(path_or_id: str, revision: str | None = None, download_dir: str | None = None) -> PreTrainedTokenizerBase | None:
    """Read the tokenizer of a model from a folder or a hub id; ``None`` if the model has none.

    Args:
        path_or_id: a folder or hub id.
        revision: as in `load_config`.
        download_dir: as in `load_config`.

    Raises:
        ValueError: the model does not exist, or its tokenizer cannot be read.
    """
    files = ModelFiles(path_or_id, revision, download_dir)
    folder = files.fetch(*TOKENIZER_FILES)
    found = sorted({path.name for pattern in TOKENIZER_SIGNS for path in folder.glob(pattern)})
    if not found:
        return None
    try:
        with _TRANSFORMERS_LOCK:
            from transformers import AutoTokenizer

            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # transformers and tokenizers raise whatever the damage leads to
        for file in found:
            if file.endswith(".json"):
                files.read_json(file)
        if "trust_remote_code" in str(error):  # which transformers advises to set
            auto_map = files.read_json(TOKENIZER_CONFIG).get("auto_map")
            raise ValueError(
                f"model {path_or_id!r} has a {TOKENIZER_CONFIG} with auto_map={shown(auto_map)}, which is not allowed: "
                f"no code of checkpoints is run, and transformers itself has no such tokenizer"
            ) from error
        raise ValueError(f"model {path_or_id!r} has a tokenizer that cannot be read ({_some(found)}): {one_line(error)}") from error
    if tokenizer.get_vocab().keys() <= {*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()}:
        raise ValueError(
            f"model {path_or_id!r} has a tokenizer without a vocabulary ({_some(found)}): it knows special tokens only"
        )
    return tokenizer


def download(path_or_id: str, revision: str | None) -> str:
    """Return the folder of a model, of one on the hub after downloading all that is read of it.

    Args:
        path_or_id: a folder or hub id.
        revision: as in `load_config`.

    Raises:
        ValueError: the model does not exist or is not supported.
    """
    files = ModelFiles(path_or_id, revision)
    read_config(files)
    return str(files.fetch(*CONFIG_FILES, *TOKENIZER_FILES, *_weight_files(files)))


def load_model(
    path_or_id: str,
    *,
    dtype: str | torch.dtype,
    backend: Backend,
    max_positions: int | None = None,
    pack: bool = True,
    order: TokenOrder | None = None,
    revision: str | None = None,
    download_dir: str | None = None,
) -> Decoder:
    """Read a model from a folder or a hub id, ready to run.

    The config is read before any weights are downloaded, and only those files are that are loaded. The weights are streamed
    into the decoder piece by piece: besides them, only a few MiB of the files are mapped.

    Args:
        path_or_id: a folder with config.json and safetensors weights, or a hub id.
        dtype: "auto", "float32", "bfloat16", "float16" or the torch dtype; see `resolve_dtype`.
        backend: that runs the model.
        max_positions: positions that can be run; by default all that the model was trained for.
        pack: pack the weights where possible; see `Decoder.prepare`.
        order: of the tokens; ``None`` = the checkpoint's.
        revision: as in `load_config`.
        download_dir: as in `load_config`.

    Raises:
        ValueError: the model does not exist, is not supported, or has weights that do not fit its config.
    """
    files = ModelFiles(path_or_id, revision, download_dir)
    config = read_config(files)
    run_dtype = resolve_dtype(dtype, config.dtype, backend)
    model = Decoder(config, dtype=run_dtype, backend=backend, max_positions=max_positions, is_empty=True)
    destinations, tensors = destinations_of(model), _find_tensors(files)
    _check_weights(destinations, tensors, config, path_or_id)
    _load_weights(model, destinations, tensors, pack, order)
    model.prepare(pack=pack, num_outputs=None if order is None else order.num_outputs)
    return model


def read_config(files: ModelFiles) -> ModelConfig:
    """Read the config of a model.

    Raises:
        ValueError: as `load_config`.
    """
    content = read_config_file(files)
    name, folder = files.name, files.fetch(*CONFIG_FILES)
    generation = files.read_json(GENERATION_CONFIG) if (folder / GENERATION_CONFIG).exists() else {}
    with _naming(name, GENERATION_CONFIG):
        eos_token_ids = as_token_ids(generation.get("eos_token_id"))
    with _naming(name, CONFIG):
        architecture = check_supported(content)
        check_fields(content)
        with _TRANSFORMERS_LOCK:
            from transformers import AutoConfig

            config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
            return ModelConfig.read(config, architecture, eos_token_ids or None)


def read_config_file(files: ModelFiles) -> dict[str, Any]:
    """Return what config.json holds, whether or not such a model is supported.

    Raises:
        ValueError: there is none, or it is not JSON.
    """
    if not (files.fetch(*CONFIG_FILES) / CONFIG).is_file():
        raise ValueError(_no_model(files) or f"model {files.name!r} has no {CONFIG} (found {_some(files.names())}): {WHAT_IS_READ}")
    return files.read_json(CONFIG)


@contextmanager
def _naming(name: str, file: str) -> Iterator[None]:
    """Add to an error which model and file it is about."""
    try:
        yield
    except Exception as error:  # transformers raises whatever the damage leads to
        raise ValueError(f"model {name!r} has a {file} that cannot be used: {one_line(error)}") from error


def _no_model(files: ModelFiles) -> str | None:
    """Return why files without a config or without weights are no model, if they are something else that is known."""
    name, names = files.name, files.names()
    if ADAPTER_CONFIG in names:
        base = files.read_json(ADAPTER_CONFIG).get("base_model_name_or_path")
        return f"model {name!r} is an adapter (LoRA) of {base!r}, not a model: merge it into that one, and give the merged model"
    if gguf := [each for each in names if each.endswith(".gguf")]:
        return f"model {name!r} has weights in GGUF ({_some(gguf)}), which is not supported: {WHAT_IS_READ}"
    return None


@dataclass(frozen=True, slots=True)
class _StoredTensor:
    """Location of a tensor of the checkpoint."""

    model: str
    file: Path
    key: str
    shape: tuple[int, ...]


def _weight_files(files: ModelFiles) -> list[str]:
    """Return the names of the weight files that are loaded.

    Raises:
        ValueError: the index is damaged.
    """
    if not (files.fetch(*CONFIG_FILES) / WEIGHT_INDEX).is_file():
        return [SINGLE_WEIGHT_FILE]
    weight_map = files.read_json(WEIGHT_INDEX).get("weight_map")
    place = f"model {files.name!r} has a {WEIGHT_INDEX} with weight_map"
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{place}={shown(weight_map)}, which is not allowed: it must be an object of weights and their files")
    for key, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise ValueError(
                f"{place}[{key!r}]={file!r}, which is not allowed: it must be the name of a .safetensors file beside it"
            )
    return sorted(set(weight_map.values()))


def _find_tensors(files: ModelFiles) -> dict[str, _StoredTensor]:
    """Read the headers of all weight files, downloading them if need be; return the tensors by name."""
    from safetensors import SafetensorError, safe_open

    name, weight_files = files.name, _weight_files(files)
    folder = files.fetch(*weight_files)
    tensors = {}
    for file in (folder / each for each in weight_files):
        if not file.is_file():
            found = [each for each in files.names() if each.endswith((".bin", ".safetensors", ".pt", ".pth"))]
            raise ValueError(
                _no_model(files)
                or f"model {name!r} has no weight file {file.name}: weights must be in {SINGLE_WEIGHT_FILE} "
                f"or in the files of {WEIGHT_INDEX} (found {_some(found)})"
            )
        try:
            with safe_open(file, framework="pt") as reader:
                for key in reader.keys():  # noqa: SIM118 (the reader is no mapping)
                    stored = reader.get_slice(key)
                    if stored.get_dtype() not in WEIGHT_DTYPES:
                        raise ValueError(
                            f"model {name!r} has weight {key!r} of dtype {stored.get_dtype()} in {file.name}, which is not "
                            f"supported: it must be one of {', '.join(sorted(WEIGHT_DTYPES))}"
                        )
                    tensors[key] = _StoredTensor(name, file, key, tuple(stored.get_shape()))
        except (SafetensorError, OSError) as error:
            raise ValueError(f"model {name!r} has a damaged weight file {file.name}: {one_line(error)}") from error
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
                f"model {name!r} has weight {key!r} of shape {list(tensors[key].shape)} in {tensors[key].file.name}: "
                f"its config asks for {list(destination.shape)}"
            )


def _load_weights(
    model: Decoder, destinations: dict[str, Destination], tensors: dict[str, _StoredTensor], pack: bool, order: TokenOrder | None
) -> None:
    """Fill the parameters of an empty decoder one by one, and pack those that can be."""
    places = None if order is None else order.token_ids.argsort().to(model.device)  # of the checkpoint's tokens
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
            _copy_tensor(value[destinations[key].rows], tensors[key], places if parameter in ("embedding", "lm_head") else None)
        setattr(owner, parameter, nn.Parameter(model.ops.pack(value) if is_packed else value, requires_grad=False))
        del value


def _some(names: list[str], limit: int = 5) -> str:
    listed = ", ".join(names[:limit]) or "none"
    return f"{listed} and {len(names) - limit} more" if len(names) > limit else listed


def _copy_tensor(target: Tensor, tensor: _StoredTensor, places: Tensor | None) -> None:
    """Copy a stored tensor piece by piece; one without the target's first dimension is broadcast along it.

    Args:
        target: rows of a parameter.
        tensor: of the checkpoint.
        places: int64 [rows], where its rows go; ``None`` = in their order.

    Raises:
        ValueError: numbers of it are not finite, or not in the target's dtype.
    """
    if target.dim() > len(tensor.shape):
        target.copy_(_read_rows(tensor, slice(None), target.dtype))
        return
    step = max(1, CHUNK_BYTES // max(1, target[:1].nbytes))
    for first in range(0, len(target), step):
        rows = slice(first, first + step)
        read = _read_rows(tensor, rows, target.dtype)
        if places is None:
            target[rows].copy_(read)
        else:
            target.index_copy_(0, places[rows], read.to(target))


def _read_rows(tensor: _StoredTensor, rows: slice, dtype: torch.dtype) -> Tensor:
    """Map some rows of a stored tensor, and check that a dtype holds their numbers.

    The file is reopened each time, because pages that were read stay mapped, and count as memory of the process,
    as long as the file is open.
    """
    from safetensors import safe_open

    with safe_open(tensor.file, framework="pt") as reader:
        read: Tensor = reader.get_slice(tensor.key)[rows]
    low, high = read.aminmax()
    if not (low >= torch.finfo(dtype).min and high <= torch.finfo(dtype).max):  # a NaN fails as well
        raise ValueError(
            f"model {tensor.model!r} has weight {tensor.key!r} with numbers that are not finite in "
            f"{str(dtype).removeprefix('torch.')}, in {tensor.file.name}: NaN and infinities are not allowed"
        )
    return read
