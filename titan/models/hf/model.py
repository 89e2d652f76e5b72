"""A model of transformers with the interface of Titan's own decoder."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from titan.core.kv_tensor import KVLayout, KVTensor
from titan.kernels.interfaces import Backend, PassInputs
from titan.models.config import ModelConfig
from titan.models.hf.gathered import GatheredAttention
from titan.models.hf.head import Head, find_decoder
from titan.models.hf.paged import PagedAttention
from titan.models.hf.replace import replace_modules
from titan.models.token_order import TokenOrder

CHECKED_SLOTS = 16
"""Slots of the cache in which modules are compared with those that replace them."""


class TransformersModel:
    """A causal language model whose modules are transformers', over paged KV; see `titan.kernels.interfaces.Model`.

    It is made of one with its weights on the back end's device, whose modules are replaced, see `replace_modules`.
    """

    weight_bits: int | None = None

    def __init__(
        self,
        model: Any,
        config: ModelConfig,
        attending: PagedAttention | GatheredAttention,
        *,
        dtype: torch.dtype,
        backend: Backend,
        order: TokenOrder | None,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.device = backend.device
        self.ops = backend.layer_ops(dtype, config.traits)
        self._attending = attending
        self._decoder: nn.Module = find_decoder(model)
        checked_kv = KVTensor(self.kv_layout, 1, CHECKED_SLOTS, self.device)
        replace_modules(model, self._decoder, self.ops, checked_kv, config.max_position_embeddings, dtype)
        self._head = Head(model, self._decoder, self.device)
        self._order = None if order is None else order.token_ids.to(self.device)
        self._outputs = None if order is None else order.token_ids[: order.num_outputs].to(self.device)

    @property
    def kv_layout(self) -> KVLayout:
        return self.config.kv_layout(self.dtype)

    def hidden_states(self, inputs: PassInputs, kv: KVTensor) -> Tensor:
        """Run the decoder on the query tokens of a pass, and write their KV: [L, hidden_size]."""
        token_ids = inputs.token_ids if self._order is None else self._order[inputs.token_ids]
        hidden = self._attending.decode(self._decoder, token_ids, inputs, kv, self.ops)
        return hidden if inputs.logits_rows is None else hidden.index_select(0, inputs.logits_rows)

    def logits(self, hidden: Tensor) -> Tensor:
        """Apply the output head: [L, hidden_size] -> [L, vocab_size], or as many as the order of tokens has outputs."""
        logits = self._head(hidden)
        return logits if self._outputs is None else logits.index_select(1, self._outputs)
