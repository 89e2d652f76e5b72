"""One config-driven decoder for the Llama family and its relatives, see `titan.models.registry`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from titan.core.kv_tensor import KVLayout, KVTensor
from titan.kernels.interfaces import Backend, PassInputs
from titan.models.config import DecoderConfig
from titan.models.layers import LayerStep, LayerWeights, Projection, add_part, attention, gated, layer_shapes, norm
from titan.models.rope import rope_table


class Decoder(nn.Module):
    """A causal language model over paged KV.

    Its weights are on the meta device, without memory, until the caller replaces them; then `prepare` must be called once.

    Args:
        config: of the model.
        dtype: of weights, activations and logits.
        backend: that runs it.
    """

    # made by `prepare`
    layer_weights: tuple[LayerWeights, ...]  # packed or plain
    _next_norms: tuple[Tensor | None, ...]  # per layer, the norm weight applied to its output
    head: Tensor

    def __init__(self, config: DecoderConfig, *, dtype: torch.dtype, backend: Backend) -> None:
        super().__init__()
        self.config = config
        self.dtype = dtype
        self.device = backend.device
        self.ops = backend.layer_ops(dtype, config.traits)
        self.weight_bits: int | None = None
        scale = config.embedding_scale
        self.embedding_scale = torch.tensor(scale, dtype=dtype).item() if config.family.rounds_embedding_scale else scale

        def empty(name: str, *shape: int) -> nn.Parameter:
            own_dtype = torch.float32 if config.family.has_wide_norms and name.endswith("_norm") else dtype
            return nn.Parameter(torch.empty(shape, dtype=own_dtype, device="meta"), requires_grad=False)

        self.embedding = empty("embedding", config.vocab_size, config.hidden_size)
        shapes = layer_shapes(config)
        self.layers = nn.ModuleList(
            nn.ParameterDict({name: empty(name, *shape) for name, shape in shapes.items()}) for _ in range(config.num_layers)
        )
        self.final_norm = empty("final_norm", config.hidden_size)
        self.lm_head = None if "tied_embedding" in config.traits else empty("lm_head", config.vocab_size, config.hidden_size)

    def prepare(self, *, pack: bool = True, weight_bits: int | None = None, num_outputs: int | None = None) -> None:
        """Make the weights ready to run; call once, after loading.

        Args:
            pack: pack those weights that are not packed yet; see `is_packable`.
            weight_bits: 8 rounds these to 8 bits each; ``None`` leaves them as they are.
            num_outputs: the first tokens, which alone get logits; ``None`` = all.
        """
        config, layer_weights = self.config, []
        assert weight_bits is None or (pack and self.ops.packs_8_bits)
        self.weight_bits = weight_bits
        # Tables are computed in float32 and rounded once, as transformers rounds its cosines and sines (it keeps OLMo's).
        tables = {
            rope: rope_table(rope, config.head_dim, config.max_position_embeddings).to(self.device, self.dtype)
            for rope in set(config.ropes)
        }
        for parameters, rope in zip(self.layers, config.ropes, strict=True):
            assert isinstance(parameters, nn.ParameterDict)
            for name in parameters if pack else ():
                self._pack_parameter(parameters, name)
            layer_weights.append(LayerWeights(**parameters, rope_table=tables[rope]))
        for name in ("embedding", "lm_head") if pack else ():
            self._pack_parameter(self, name)
        self.layer_weights = tuple(layer_weights)
        self._next_norms = (*(weights.input_norm for weights in layer_weights[1:]), self.final_norm)
        self.head = (self.embedding if self.lm_head is None else self.lm_head).detach()[:num_outputs]

    def is_packable(self, parameter: str) -> bool:
        """Whether a parameter of the decoder or of a layer belongs to a linear layer: a tied embedding does, too."""
        return parameter.endswith("_weight") or parameter == ("embedding" if self.lm_head is None else "lm_head")

    @property
    def kv_layout(self) -> KVLayout:
        return self.config.kv_layout(self.dtype)

    def hidden_states(self, inputs: PassInputs, kv: KVTensor) -> Tensor:
        """Run all but the output head on the query tokens of a pass, and write their KV; positions are not checked.

        Returns:
            The input of `logits` for the rows that need logits: [L, hidden_size].
        """
        config, ops, eps = self.config, self.ops, self.config.rms_norm_eps
        plan = ops.plan_attention(inputs.attention)
        step = LayerStep(ops, plan, inputs.positions, inputs.slot_mapping)
        x = ops.look_up(inputs.token_ids, self.embedding, config.hidden_size)
        if self.embedding_scale != 1:
            x = x * self.embedding_scale
        normed = norm(x, self.layer_weights[0].input_norm, eps, ops)
        rows, last = inputs.logits_rows, config.num_layers - 1
        for layer, (weights, next_norm) in enumerate(zip(self.layer_weights, self._next_norms, strict=True)):
            attended = attention(normed, weights, config, layer, kv.layers[layer], step)
            if layer == last and rows is not None and len(rows) < len(x):  # the other rows are done: their KV is written
                x, attended = x.index_select(0, rows), attended.index_select(0, rows)
            output = Projection(weights.output_weight, weights.output_bias, weights.output_norm)
            x, normed = add_part(attended, output, x, weights.gate_up_norm, eps, ops)
            down = Projection(weights.down_weight, weights.down_bias, weights.down_norm)
            x, normed = add_part(gated(normed, weights, config, ops), down, x, next_norm, eps, ops)
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        """Apply the output head: [L, hidden_size] -> [L, vocab_size], or as many as `prepare` was told."""
        return self.ops.linear(hidden, self.head, None)

    def _pack_parameter(self, owner: nn.Module, parameter: str) -> None:
        if self.is_packable(parameter):
            packed = self.ops.pack(owner.get_parameter(parameter), self.weight_bits)
            setattr(owner, parameter, nn.Parameter(packed, requires_grad=False))
