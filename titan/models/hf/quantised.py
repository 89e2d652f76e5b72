"""Quantised checkpoints, which transformers loads with the packages that make them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from titan.models.files import one_line


def quantisation(config: Any) -> dict[str, Any] | None:
    """Return what a config of transformers says about the quantisation of its weights; ``None`` if they are not quantised."""
    for each in (config, config.get_text_config()):
        if (found := getattr(each, "quantization_config", None)) is not None:
            return found if isinstance(found, dict) else found.to_dict()
    return None


def check_quantisation(config: Any) -> None:
    """Refuse a checkpoint whose quantisation transformers cannot load here.

    Raises:
        ValueError: names the method, and what to install.
    """
    if (found := quantisation(config)) is None:
        return
    from transformers.quantizers.auto import AutoHfQuantizer

    method = f"quantization_config has quant_method={found.get('quant_method')!r}, which cannot be loaded here"
    try:
        quantiser = AutoHfQuantizer.from_config(copy.deepcopy(found), pre_quantized=True)
        quantiser.validate_environment(device_map=None, weights_only=True)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        raise ValueError(f"{method}: `pip install {package.replace('_', '-')}`, for there is no module {package}") from error
    except ImportError as error:  # it says what to install
        raise ValueError(f"{method}: {' '.join(str(error).split())}") from error
    except Exception as error:  # each method has its own
        raise ValueError(f"{method}: {one_line(error)}") from error


def plain_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and tensors of all weights of a module, quantised ones in parts, such as integers and scales."""
    for name, weight in module.named_parameters():
        yield from ((name, part) for part in _parts(weight.detach()))


def num_bytes(module: nn.Module) -> int:
    """Return the memory that the weights of a module take."""
    buffers = sum(each.nbytes for each in module.buffers())
    return buffers + sum(part.nbytes for _, part in plain_tensors(module))


def _parts(tensor: Any) -> Iterator[Tensor]:
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from _parts(getattr(tensor, name))
