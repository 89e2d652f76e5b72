"""Quantised checkpoints, which transformers loads with the packages that make them."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from titan.core.dtypes import RUN_DTYPES
from titan.models.files import one_line

WITHOUT_CHECKPOINTS = ("hqq", "quanto")
"""Methods by which transformers quantises models that it loads, and whose quantised checkpoints it cannot read."""
OUTLIERS = 6.0
"""Threshold of bitsandbytes where a config has none."""


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

    name = found.get("quant_method")
    method = f"quantization_config has quant_method={name!r}, which cannot be loaded here"
    if name in WITHOUT_CHECKPOINTS:
        raise ValueError(f"{method}: transformers reads no quantised checkpoints of it")
    if name == "gptq" and find_spec("gptqmodel") is None:  # transformers would ask for a GPU
        raise ValueError(f"{method}: `pip install optimum gptqmodel`")
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


def mixes_rows(found: Mapping[str, Any]) -> bool:
    """Whether the output of a row depends on the rows beside it: LLM.int8 computes columns apart in which any has an outlier."""
    return bool(found.get("load_in_8bit")) and found.get("llm_int8_threshold", OUTLIERS) > 0


def cast_unquantised(model: Any, plain: nn.Module, dtype: torch.dtype) -> None:
    """Cast the weights that are not quantised, of which some quantisers leave the dtype as it is in the checkpoint.

    Which these are follows from the same model without quantisation. Weights that transformers keeps in float32 stay as they are.
    """
    modules: dict[str, nn.Module] = dict(model.named_modules())
    kept = [pattern.replace("*", ".*") for pattern in model._get_dtype_plan(dtype)]
    for path, module in plain.named_modules():
        found = modules.get(path)
        if found is None or type(found) is not type(module):  # the quantiser's own
            continue
        for name, _ in module.named_parameters(recurse=False):
            weight = getattr(found, name, None)  # packed weights have other names
            is_kept = any(re.search(pattern, f"{path}.{name}") for pattern in kept)
            if type(weight) is nn.Parameter and weight.dtype in RUN_DTYPES.values() and not is_kept:
                weight.data = weight.data.to(dtype)


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
