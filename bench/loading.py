"""Models as benchmarks load them themselves."""

from __future__ import annotations

import argparse
from typing import Any

import torch

from titan.bench.options import model_options
from titan.kernels.interfaces import Backend, Model
from titan.models.decoder import Decoder
from titan.models.files import ModelFiles
from titan.models.loader import load_model, load_tokenizer, open_model, resolve_model


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
