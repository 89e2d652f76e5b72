"""Models as benchmarks load them themselves."""

from __future__ import annotations

import torch

from titan.kernels.interfaces import Backend
from titan.models.decoder import Decoder
from titan.models.files import ModelFiles
from titan.models.loader import load_model, open_model


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
