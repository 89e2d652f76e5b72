"""Checkpoints of a language model and more, such as a vision tower: what only images, video or sound go through is left out."""

from __future__ import annotations

import re
from typing import Any

from torch import nn


def module_path(model: nn.Module, inner: nn.Module) -> list[str]:
    """Return the names that lead from a model to a module inside of it."""
    name: str = next(name for name, module in model.named_modules() if module is inner)
    return name.split(".")


def is_composite(config: Any) -> bool:
    """Whether a config of transformers has one of a language model inside of it."""
    return config.get_text_config() is not config


def composite_class(config: Any) -> Any | None:
    """Return transformers' class of models with a composite config, text-only; ``None`` of other configs, and if it has none."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING as MAPPING

    return _text_only(MAPPING[type(config)]) if is_composite(config) and type(config) in MAPPING else None


def _text_only(model_class: Any) -> Any:
    """Return a class like another, whose models have neither the modules that text does not go through, nor weights for them."""

    def init(self: Any, config: Any, *args: Any, **options: Any) -> None:
        model_class.__init__(self, config, *args, **options)
        removed = _keep_language_model(self)
        self._keys_to_ignore_on_load_unexpected |= {f"^{re.escape(name)}\\." for name in removed}

    # transformers looks up conversions of weights by the class's name, and reads the source of its module
    return type(model_class.__name__, (model_class,), {"__init__": init, "__module__": model_class.__module__})


def _keep_language_model(model: Any) -> list[str]:
    """Remove the modules beside a model's decoder, other than its output layer, and return their names."""
    decoder, output = model.get_decoder(), model.get_output_embeddings()
    path = module_path(model, decoder)
    removed = []
    for depth, kept in enumerate(path):
        parent: nn.Module = model.get_submodule(".".join(path[:depth]))
        for name, child in list(parent.named_children()):
            if name != kept and child is not output:
                delattr(parent, name)
                removed.append(".".join([*path[:depth], name]))
    return removed
