"""Models and engines as benchmarks load them themselves."""

from __future__ import annotations

import argparse
from typing import Any

import torch

from titan.bench.options import model_options
from titan.core.limits import MAX_NODES
from titan.kernels.backend import choose_backend, choose_device
from titan.kernels.interfaces import Backend, Model
from titan.models.decoder import Decoder
from titan.models.files import ModelFiles, resolve_model
from titan.models.loader import load_model, open_model
from titan.models.tokenizer import load_tokenizer

BLOCK_SIZE = 16
"""Slots per KV block."""


def threads_on(device: torch.device) -> int | None:
    """Return the threads of a CPU for `choose_backend` and `LLM`: those that --threads gives PyTorch and other engines, too."""
    return torch.get_num_threads() if device.type == "cpu" else None


def open_backend(device: str = "auto") -> Backend:
    """Choose the back end of a device, with the threads of the command line on a CPU."""
    chosen = choose_device(device)
    return choose_backend(chosen, threads_on(chosen))


def engine_options(args: argparse.Namespace, max_batch_size: int, max_model_len: int, **options: Any) -> dict[str, Any]:
    """Return options of an engine, as `LLM` and `EngineConfig.of` take them: without a prefix cache, and with KV for all requests.

    Args:
        args: of a parser with `add_target`, `add_draft_weight_bits` and ``dtype``.
        max_batch_size: requests that run at once, each of which has KV for its longest text and widest search.
        max_model_len: tokens of the longest request, prompt and output.
        options: others, which may also replace these.
    """
    return {
        "dtype": args.dtype,
        "draft_weight_bits": args.draft_weight_bits,
        **model_options(args),
        "max_batch_size": max_batch_size,
        "max_model_len": max_model_len,
        "block_size": BLOCK_SIZE,
        "num_kv_blocks": max_batch_size * -(-(max_model_len + MAX_NODES) // BLOCK_SIZE),
        "enable_prefix_caching": False,
        **options,
    }


def load_target(args: argparse.Namespace, backend: Backend) -> tuple[Model, Any | None]:
    """Load the target and its tokenizer, if it has one, for engines that share them.

    Args:
        args: of a parser with `add_target`, and ``dtype``.
        backend: that runs the model.

    Raises:
        ValueError: it cannot be used.
    """
    files = ModelFiles(resolve_model(args.model, "target"))
    tokenizer = load_tokenizer(files, trust_remote_code=args.trust_remote_code)
    checkpoint = open_model(files, **model_options(args))
    return load_model(checkpoint, dtype=args.dtype, backend=backend), tokenizer


def load_decoder(path_or_id: str, *, dtype: str | torch.dtype, backend: Backend, pack: bool = True) -> Decoder:
    """Load a model that Titan has a decoder for.

    Args:
        path_or_id: a folder or hub id.
        dtype: as of `load_model`.
        backend: likewise.
        pack: likewise; weights that are to be changed must not be packed.

    Raises:
        ValueError: as `open_model` and `load_model`, and there is no decoder for it.
    """
    model = load_model(open_model(ModelFiles(path_or_id), "native"), dtype=dtype, backend=backend, pack=pack)
    assert isinstance(model, Decoder)
    return model
