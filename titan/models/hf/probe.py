"""One pass of one token, in which each attention layer of a model tells what it asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from titan.core.attention import AttentionSpec, Chunk, LayerSpec, Window
from titan.models.hf.latents import has_latents, latent_spec

PROBE = "titan_probe"
"""Name under which the attention and the masks of a probe are registered."""
UNMASKED_PROBE = "titan_unmasked_probe"
"""Name under which the attention of a probe is registered alone, for which transformers makes no masks."""
OPTIONS = {"sliding_window", "softcap", "s_aux", "is_causal"} | {"dropout", "position_ids", "use_cache", "output_attentions"}
"""What modules may tell the attention function by name; the latter four change nothing here."""
LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention")
"""Those of a config's ``layer_types`` whose only state is keys and values."""
VISIBILITY = "titan_visibility"
"""Attribute of a probe's mask that holds its `Visibility`."""
PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm, torch.ops.aten.baddbmm)
"""Operations whose time is that of reading weights."""


class Visibility(NamedTuple):
    """What a mask shows to a token."""

    is_causal: bool
    window: Window


class Call(NamedTuple):
    """A call of the attention function."""

    module: nn.Module
    query: Tensor  # [1, H, T, D]
    key: Tensor  # [1, K, T, D]
    value: Tensor  # [1, K, T, V]
    mask: Any
    visibility: Visibility | None  # None: the mask does not say
    scaling: float | None
    options: dict[str, Any]


_CALLS: ContextVar[list[Call]] = ContextVar("titan_probe_calls")


class ProbedModule(NamedTuple):
    """What an attention module asks for."""

    name: str  # in the model
    spec: LayerSpec
    expanded: LayerSpec | None  # of one that attends to latents: that of its attention to what they expand to
    sinks: str | None  # name of the parameter, [H]
    source: int | None  # index of the module whose keys and values it reads; None: its own


class _WithoutProducts(TorchDispatchMode):
    """Makes products of matrices zero, as they are where weights are, without computing them."""

    def __torch_dispatch__(self, function: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if function.overloadpacket not in PRODUCTS:
            return function(*args, **(kwargs or {}))
        shape = function(*(each.to("meta") for each in args)).shape
        return args[0].new_zeros(shape)


@contextmanager
def without_weights(model: nn.Module) -> Iterator[None]:
    """Let a model of the meta device run: its numbers are zeros, of which those of weights take no memory and no time.

    They are numbers all the same: which experts run, for instance, follows from them.
    """
    for module in model.modules():
        for name, weight in module.named_parameters(recurse=False):
            module._parameters[name] = nn.Parameter(torch.zeros((), dtype=weight.dtype).expand(weight.shape), requires_grad=False)
        for name, buffer in module.named_buffers(recurse=False):  # some are written to
            module._buffers[name] = torch.zeros(buffer.shape, dtype=buffer.dtype)
    with _WithoutProducts():  # type: ignore[no-untyped-call]
        yield


@contextmanager
def recording() -> Iterator[list[Call]]:
    """Collect the calls of the probe's attention in this thread."""
    calls: list[Call] = []
    token = _CALLS.set(calls)
    try:
        yield calls
    finally:
        _CALLS.reset(token)


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, scaling: float | None = None, **options: Any
) -> tuple[Tensor, None]:
    """Record the call, and attend to nothing; the signature is that of transformers' attention functions."""
    visibility = getattr(attention_mask, VISIBILITY, None)
    _CALLS.get().append(Call(module, query, key, value, attention_mask, visibility, scaling, options))
    return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1]), None


def make_mask(*_: Any, mask_function: Callable[..., Any], local_size: int | None = None, device: Any = None, **__: Any) -> Tensor:
    """Return a mask of one element that says what masks of this kind show; the signature is that of transformers' mask functions.

    The window is asked of the mask function itself, because not all models tell it to their attention.
    """
    mask = torch.zeros(1, 1, 1, 1, device=device)
    zero = torch.zeros((), dtype=torch.int64)

    def sees(query: int, key: int) -> bool:
        return bool(mask_function(zero, zero, torch.tensor(query), torch.tensor(key)))

    window: Window = local_size
    if local_size is not None and local_size > 1 and not sees(local_size, 1):
        window = Chunk(local_size)
    setattr(mask, VISIBILITY, Visibility(not sees(0, 1), window))
    return mask


def run_experts(_module: nn.Module, hidden_states: Tensor, _index: Tensor, _weights: Tensor) -> Tensor:
    """Return zeros; the signature is that of transformers' expert functions."""
    return torch.zeros_like(hidden_states)


def read_modules(model: nn.Module, calls: list[Call], text_config: Any) -> list[ProbedModule]:
    """Return what the attention modules of a model ask for, in the order in which they run.

    Raises:
        ValueError: a layer does what paged tree attention cannot do; names it.
    """
    layer_types = getattr(text_config, "layer_types", None) or ()
    names = {module: name for name, module in model.named_modules()}
    layers: list[ProbedModule] = []
    for index, call in enumerate(calls):
        if any(names[call.module] == each.name for each in layers):
            raise ValueError(f"{type(call.module).__name__} attends several times in a pass, which is not supported")
        place = getattr(call.module, "layer_idx", index)
        kind = layer_types[place] if isinstance(place, int) and place < len(layer_types) else None
        source = next((i for i in reversed(range(index)) if calls[i].key is call.key), None)
        while source is not None and (earlier := layers[source].source) is not None:
            source = earlier
        spec, expanded = _layer_spec(call, kind, text_config), None
        if has_latents(call.module):
            spec, expanded = latent_spec(call.module, spec), spec
        layers.append(ProbedModule(names[call.module], spec, expanded, _name_of_sinks(call), source))
    if len(layers) != text_config.num_hidden_layers:
        raise ValueError(
            f"{len(layers)} of {text_config.num_hidden_layers} layers attend through transformers' attention interface: layers "
            f"that keep another state than keys and values, or do not run for text alone, are not supported"
        )
    return layers


def _name_of_sinks(call: Call) -> str | None:
    if (sinks := call.options.get("s_aux")) is None:
        return None
    for name, parameter in call.module.named_parameters():
        if parameter is sinks:
            return name
    raise ValueError(f"{type(call.module).__name__} computes its sinks (s_aux), which is not supported: they must be a parameter")


def check_masks(calls: list[Call]) -> None:
    """Refuse a model that builds masks itself, given the calls of a pass for which transformers made none: it would not be heard.

    Raises:
        ValueError: names the attention module.
    """
    for call in calls:
        if call.mask is not None:
            raise ValueError(f"{type(call.module).__name__} gets a mask that the model builds itself, which is not supported")


def _layer_spec(call: Call, kind: str | None, text_config: Any) -> LayerSpec:
    module, options = call.module, call.options
    if unknown := sorted(options.keys() - OPTIONS):
        raise ValueError(f"{type(module).__name__} asks attention for {', '.join(unknown)}, which is not supported")
    is_causal = options.get("is_causal")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise ValueError(f"{type(module).__name__} has attention that is not causal, which is not supported")
    if call.visibility is not None and not call.visibility.is_causal:
        raise ValueError(f"{type(module).__name__} has a mask that shows later tokens, which is not supported")
    num_heads, key_dim = call.query.shape[1], call.query.shape[3]
    value_dim = call.value.shape[3]
    head_dim = max(key_dim, value_dim)
    scale = key_dim**-0.5 if call.scaling is None else float(call.scaling)
    window = _window(call, kind, text_config)
    attention = AttentionSpec(scale, window, options.get("softcap"), None if value_dim == head_dim else value_dim)
    return LayerSpec(num_heads, call.key.shape[1], head_dim, attention, has_sinks=options.get("s_aux") is not None)


def _window(call: Call, kind: str | None, text_config: Any) -> Window:
    """Return the window that a layer's mask shows; of a mask that does not say, what the layer tells its attention, or its kind."""
    if call.visibility is not None:
        return call.visibility.window
    if kind == "chunked_attention":
        return Chunk(text_config.attention_chunk_size)
    told: int | None = call.options.get("sliding_window")
    return text_config.sliding_window if told is None and kind == "sliding_attention" else told
