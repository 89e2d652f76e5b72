"""Checkpoints that take images as well: the language model runs, the rest is neither loaded nor in memory, and a line says so."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from checkpoints import Checkpoint
from families import FAMILIES
from safetensors.torch import load_file, save_file

from titan.kernels.backend import choose_backend
from titan.models.files import ModelFiles
from titan.models.loader import empty_modules, load_model, open_model


def test_only_the_language_model_is_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, backend = Checkpoint(FAMILIES["gemma3"], tmp_path), choose_backend(torch.device("cpu"))
    whole = {name for name, _ in checkpoint.model.named_parameters()}
    language = {name for name in whole if "vision_tower" not in name and "multi_modal_projector" not in name}
    assert language < whole
    loaded = []
    monkeypatch.setattr("titan.models.hf.load.TransformersModel", lambda model, *_, **__: loaded.append(model))
    with caplog.at_level(logging.WARNING, "titan"):
        load_model(opened := open_model(ModelFiles(checkpoint.path)), dtype="float32", backend=backend)
    assert {name for name, _ in loaded[0].named_parameters()} == language
    [line] = [record.getMessage() for record in caplog.records if record.name.startswith("titan")]
    assert line == f"model {checkpoint.path!r} runs text-only: of Gemma3ForConditionalGeneration, only the language model is loaded"
    modules = empty_modules(opened.config, backend)
    assert {name for name, _ in modules.named_parameters()} == language


def test_a_missing_weight_of_the_language_model_is_still_missing(tmp_path: Path) -> None:
    checkpoint = Checkpoint(FAMILIES["gemma3"], tmp_path)
    file = Path(checkpoint.path, "model.safetensors")
    kept = {name: each for name, each in load_file(file).items() if not name.endswith("model.norm.weight")}
    save_file(
        {name: each for name, each in kept.items() if not name.endswith("language_model.norm.weight")}, file, {"format": "pt"}
    )
    with pytest.raises(ValueError, match=r"missing model.language_model.norm.weight; unexpected none"):
        load_model(open_model(ModelFiles(checkpoint.path)), dtype="float32", backend=choose_backend(torch.device("cpu")))
