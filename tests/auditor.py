"""Looking into an engine's caches: is the KV behind its counters what a fresh pass would make?"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from stepping import by_slot, slots_of
from zoo import Zoo

from titan.core.kv_tensor import Role
from titan.core.request import Request
from titan.engine import Engine


class Auditor:
    """Holds the KV of an engine's running requests against transformers'."""

    def __init__(self, zoo: Zoo, engine: Engine, target: str) -> None:
        self.zoo = zoo
        self.engine = engine
        self.target = target
        self.num_checked = {"target": 0, "draft": 0}
        self._references: dict[tuple[str, str], tuple[list[int], torch.Tensor]] = {}

    def check(self, draft: str | None, *, has_failed: bool = False) -> None:
        running = self.engine.scheduler.running
        for model in (self.target, draft):
            if model is not None:
                self._refer_to(running, model)
        for request in running:
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
        expected = self._references[request.request_id, model][1][:, :, :, :length]
        actual = by_slot(self.engine.kv.tensors[role])[:, :, :, slots_of(self.engine, request)[:length]].cpu()
        error = (actual - expected).abs().amax((0, 1, 2, 4))
        wrong = (error > 2e-3).nonzero()[:, 0].tolist()
        assert not wrong, f"{role}'s KV of request {request.request_id} is wrong at {wrong} of {length} tokens"
        self.num_checked[role] += length

    @torch.no_grad()
    def _refer_to(self, requests: Sequence[Request], model: str) -> None:
        """Compute the KV of the requests whose tokens are others: [num_layers, 2, num_kv_heads, num_tokens, head_dim] each."""
        new = [each for each in requests if self._references.get((each.request_id, model), ([],))[0] != each.token_ids]
        if not new:
            return
        padded = torch.nn.utils.rnn.pad_sequence([torch.tensor(each.token_ids) for each in new], batch_first=True)
        layers = self.zoo.model(model)(padded, use_cache=True).past_key_values.layers  # what comes after a token changes nothing
        for i, request in enumerate(new):
            kv = torch.stack([torch.stack((layer.keys[i], layer.values[i])) for layer in layers])
            self._references[request.request_id, model] = list(request.token_ids), kv[:, :, :, : request.num_tokens]
