"""Looking into an engine's caches: is the KV behind its counters what a fresh pass would make?"""

from __future__ import annotations

import torch
from stepping import by_slot, slots_of
from zoo import Zoo

from titan.core.kv_tensor import Role
from titan.core.request import Request
from titan.engine import Engine


class Auditor:
    """Holds the KV of an engine's running requests against transformers' after every step."""

    def __init__(self, zoo: Zoo, engine: Engine, target: str) -> None:
        self.zoo = zoo
        self.engine = engine
        self.target = target
        self.num_checked = {"target": 0, "draft": 0}
        self._references: dict[tuple[str, str], tuple[list[int], torch.Tensor]] = {}

    def check(self, draft: str | None, *, has_failed: bool = False) -> None:
        for request in self.engine.scheduler.running:
            assert request.num_computed_tokens < request.num_tokens
            # a step that failed behind its draft has drafted for nothing
            assert request.num_drafted_context <= (request.num_tokens if has_failed else request.num_computed_tokens)
            self._check(request, "target", self.target, request.num_computed_tokens)
            if draft is None:
                assert "draft" not in self.engine.kv.tensors and request.num_drafted_context == 0
            else:
                self._check(request, "draft", draft, request.num_drafted_context)

    def _check(self, request: Request, role: Role, model: str, length: int) -> None:
        if length == 0:
            return
        expected = self._reference(request, model)[:, :, :, :length]
        actual = by_slot(self.engine.kv.tensors[role])[:, :, :, slots_of(self.engine, request)[:length]]
        error = (actual - expected).abs().amax((0, 1, 2, 4))
        wrong = (error > 2e-3).nonzero()[:, 0].tolist()
        assert not wrong, f"{role}'s KV of request {request.request_id} is wrong at {wrong} of {length} tokens"
        self.num_checked[role] += length

    @torch.no_grad()
    def _reference(self, request: Request, model: str) -> torch.Tensor:
        """Of all tokens of a request: [num_layers, 2, num_kv_heads, num_tokens, head_dim]."""
        token_ids, kv = self._references.get((request.request_id, model), ([], torch.empty(0)))
        if token_ids != request.token_ids:
            layers = self.zoo.model(model)(torch.tensor([request.token_ids]), use_cache=True).past_key_values.layers
            kv = torch.stack([torch.stack((layer.keys[0], layer.values[0])) for layer in layers])
            self._references[request.request_id, model] = list(request.token_ids), kv
        return kv
