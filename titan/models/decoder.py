"""One config-driven decoder for the Llama family: Llama, Mistral, Qwen2 and Qwen3."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan.batch import RaggedBatch
from titan.kernels.linear import can_pack, linear, pack_weight
from titan.models.config import ModelConfig
from titan.models.layers import LayerWeights, attention, layer_shapes, mlp
from titan.models.rope import rope_table

MAX_HEAD_COPY_BYTES = 128 * 2**20
"""A tied output head is packed, as a second copy of the embedding, only up to this size."""


class Decoder(nn.Module):
    """A causal language model over paged KV.

    After the weights are in place, `prepare` must be called once.

    Args:
        config: of the model.
        dtype: of weights, activations and logits.
        device: where the weights are allocated.
        max_positions: positions that can be run, at most (and by default) ``config.max_position_embeddings``.

    Raises:
        ValueError: ``max_positions`` is more than the model was trained for.
    """

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device, max_positions: int | None = None) -> None:
        super().__init__()
        limit = config.max_position_embeddings
        self.max_positions = limit if max_positions is None else max_positions
        if not 0 < self.max_positions <= limit:
            raise ValueError(f"max_positions={max_positions} is not allowed: this model has positions for 1 to {limit} tokens")
        self.config = config
        self.dtype = dtype
        self.device = device

        def empty(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)

        self.embedding = empty(config.vocab_size, config.hidden_size)
        shapes = layer_shapes(config)
        self.layers = nn.ModuleList(
            nn.ParameterDict({name: empty(*shape) for name, shape in shapes.items()}) for _ in range(config.num_layers)
        )
        self.final_norm = empty(config.hidden_size)
        self.lm_head = None if config.tie_word_embeddings else empty(config.vocab_size, config.hidden_size)
        # The table is computed in float32 and rounded once, as transformers rounds its cosines and sines.
        self._rope_table = rope_table(config.rope, self.max_positions).to(device, dtype)
        self._layer_weights: tuple[LayerWeights, ...] = ()
        self._head: Tensor = self.embedding

    @torch.no_grad()
    def prepare(self, *, pack: bool = True) -> None:
        """Make the weights ready to run; call once, after loading.

        Args:
            pack: replace the weights of linear layers by packed ones where `can_pack`. Each plain weight is freed before
                the next is packed. A tied embedding stays, and is packed as well if it is small.
        """
        layer_weights = []
        for parameters in self.layers:
            assert isinstance(parameters, nn.ParameterDict)
            for name, weight in parameters.items():
                if pack and name.endswith("_weight") and can_pack(weight):
                    parameters[name] = nn.Parameter(pack_weight(weight), requires_grad=False)
            layer_weights.append(LayerWeights(**parameters))
        self._layer_weights = tuple(layer_weights)
        head = self.embedding if self.lm_head is None else self.lm_head
        is_small = head.nbytes <= MAX_HEAD_COPY_BYTES
        if pack and can_pack(head) and (self.lm_head is not None or is_small):
            head = nn.Parameter(pack_weight(head), requires_grad=False)
            if self.lm_head is not None:
                self.lm_head = head
        self._head = head

    def forward(self, batch: RaggedBatch, kv: Tensor) -> Tensor:
        """Run the query tokens of a batch, and write their KV.

        Args:
            batch: T query tokens, of which L need logits; planned for ``config.windows``.
            kv: [num_layers, 2, num_blocks, num_kv_heads, block_size, head_dim], updated in place.

        Returns:
            Logits of ``batch.logits_rows``: [L, vocab_size], dtype of the model.
        """
        x = F.embedding(batch.token_ids, self.embedding)
        rope = self._rope_table.index_select(0, batch.positions).transpose(0, 1).unsqueeze(2)
        is_partial = len(batch.logits_rows) < len(x)
        last = self.config.num_layers - 1
        for layer, weights in enumerate(self._layer_weights):
            attended = attention(x, weights, self.config, layer, rope, batch, kv[layer])
            if layer == last and is_partial:  # the other rows have written their KV, nobody reads on
                x, attended = x.index_select(0, batch.logits_rows), attended.index_select(0, batch.logits_rows)
            x = x.add_(linear(attended, weights.output_weight, weights.output_bias))
            x = x.add_(mlp(x, weights, self.config))
        x = F.rms_norm(x, (self.config.hidden_size,), self.final_norm, self.config.rms_norm_eps)
        return linear(x, self._head, None)
