"""Weights of 16 bits in a model that runs in float32: they are widened part by part, since most are packed into 16 bits again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from titan.models.weight_files import NARROW_DTYPES


def parts(model: nn.Module) -> list[nn.Module]:
    """Return the modules whose weights are widened together: layers, and what is beside the lists of them."""
    found: list[nn.Module] = []
    for child in model.children():
        if isinstance(model, nn.ModuleList) or not any(isinstance(each, nn.ModuleList) for each in child.modules()):
            found.append(child)
        else:
            found += parts(child)
    return found


def widen(module: nn.Module, *, recurse: bool = True) -> list[tuple[Tensor, Tensor]]:
    """Make the weights and buffers of a module float32; return those that were not, with what they were."""
    tensors = [*module.parameters(recurse), *module.buffers(recurse)]
    narrow = [(each, each.data) for each in tensors if each.dtype in NARROW_DTYPES]
    for each, numbers in narrow:
        each.data = numbers.float()
    return narrow


@contextmanager
def widened_in_turn(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Widen each of some modules while it runs, and no longer; of embeddings, which may be large, what they look up."""
    before: dict[nn.Module, list[tuple[Tensor, Tensor]]] = {}

    def start(module: nn.Module, _args: Any) -> None:
        before[module] = [] if isinstance(module, nn.Embedding) else widen(module)

    def end(module: nn.Module, _args: Any, output: Any) -> Any:
        for each, numbers in before.pop(module):
            each.data = numbers
        return output.float() if isinstance(module, nn.Embedding) else output

    hooks: list[Any] = []
    for module in modules:
        hooks += [module.register_forward_pre_hook(start), module.register_forward_hook(end)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
