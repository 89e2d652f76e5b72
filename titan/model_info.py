"""What a model's config says about running it: whether, how, and in how much memory."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from titan.core.dtypes import dtype_name
from titan.core.options import ModelOptions
from titan.kernels.interfaces import Backend
from titan.models.config import ModelConfig
from titan.models.files import ModelFiles, resolve_model
from titan.models.hf.describe import TransformersConfig
from titan.models.hf.quantised import quantisation
from titan.models.loader import empty_modules, how_it_runs, open_model, read_config_file, resolve_dtype

LAYERS = {
    "native": "Titan's own decoder",
    "transformers": "transformers' modules, on Titan's paged attention",
    "gathered": "transformers' modules with an attention of their own, on keys and values gathered for it, which is slower",
}

LENGTHS = (2048, 8192, 32768, 131072)
"""Tokens of requests whose KV is told, besides the longest."""


def model_facts(name: str, options: ModelOptions, backend: Backend) -> tuple[bool, dict[str, str]]:
    """Read a model's config, and nothing else of it.

    Args:
        name: "demo", a folder or a hub id.
        options: with which it would be loaded.
        backend: that would run it.

    Returns:
        Whether it runs, and facts to show, by name.

    Raises:
        ValueError: there is no such model, or it is none.
    """
    files = ModelFiles(resolve_model(name, "target"), options.revision, options.download_dir)
    read_config_file(files)  # without which there is no model
    try:
        checkpoint = open_model(files, options.model_impl, trust_remote_code=options.trust_remote_code)
        config = checkpoint.config
        run_dtype = resolve_dtype(options.dtype, config.dtype, backend)
        how = _kernels(config, run_dtype, backend)
    except ValueError as error:
        return False, {"model": name, "runs": f"no: {error}"}
    modules = empty_modules(config, backend)
    num_weights = sum(each.numel() for each in modules.parameters())
    impl = how_it_runs(config)
    stored = "a dtype that the config does not name, here float32" if config.dtype is None else dtype_name(config.dtype)
    facts = {
        "model": f"{name}, {config.architecture}, {num_weights:,} weights in {stored}",
        "runs": f"yes, {'natively' if impl == 'native' else impl} in {dtype_name(run_dtype)}: {how}",
        "layers": LAYERS[impl],
        "weights": f"{_size(num_weights * run_dtype.itemsize)} in {dtype_name(run_dtype)}",
    }
    if impl != "native":
        facts["layers"] += f", because {checkpoint.why_not_native or f'model_impl={options.model_impl!r}'}"
    if isinstance(config, TransformersConfig) and (quantised := quantisation(config.source)) is not None:
        facts["weights"] += f" if dequantised: quantization_config has quant_method={quantised.get('quant_method')!r}"
    facts["KV, 1 token"] = _size(bytes_per_token := config.kv_layout(run_dtype).bytes_per_token)
    longest = config.max_position_embeddings
    for length in (*(each for each in LENGTHS if each < longest), longest):
        facts[f"KV, {length:,} tokens{' (all)' * (length == longest)}"] = _size(length * bytes_per_token)
    return True, {**facts, "free memory": _size(backend.free_memory())}


def _kernels(config: ModelConfig, dtype: torch.dtype, backend: Backend) -> str:
    if backend.layer_ops(dtype, config.traits).name == backend.name:
        return f"{backend.name} in every layer{'' if how_it_runs(config) == 'native' else ', for its attention'}"
    missing = ", ".join(_missing(config, dtype, backend))
    return f"operation by operation in PyTorch, for {backend.name} has no {missing}"


def _missing(config: ModelConfig, dtype: torch.dtype, backend: Backend) -> Iterator[str]:
    """Yield what keeps a model from the back end's fast path."""
    if backend.layer_ops(dtype, frozenset()).name != backend.name:
        yield dtype_name(dtype)
        return
    for trait in sorted(config.traits):
        if backend.layer_ops(dtype, frozenset({trait})).name != backend.name:
            yield trait


def _size(num_bytes: int) -> str:
    """Write a number of bytes, also in the largest unit of which there is at least one."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit} ({num_bytes:,} bytes)"
    return f"{num_bytes} bytes"
