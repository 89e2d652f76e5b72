"""Passes of few tokens in one call of C++, against the decoder operation by operation in PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from back_ends import make_back_end
from tiny_models import make_model
from torch import Tensor
from twins import BLOCKS_PER_REQUEST, BOUNDS, Part, Twins

from titan.core.batch import QueryRow
from titan.core.trees import EMPTY_TREE, DraftTree
from titan.kernels.cpu.runner import CompiledRunner

FEW = 8  # so many tokens make a short pass everywhere

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "one_layer": ("llama", {"num_hidden_layers": 1}),
    "multi_query": ("llama", {"num_key_value_heads": 1}),
    "all_biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral_window": ("mistral", {"sliding_window": 3}),
    "qwen2_layers": ("qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    "qwen3_tied": ("qwen3", {"tie_word_embeddings": True, "head_dim": 32}),
    "not packed": ("qwen2", {"hidden_size": 72}),  # as the head is that shares a large embedding
}


def make_twins(folder: Path, dtype: str, *, pack: bool = True) -> Twins:
    twins = Twins(folder, make_back_end("cpu"), dtype, pack=pack)
    if not isinstance(twins.runner, CompiledRunner):
        pytest.skip("a layout of this processor that the library does not read")
    return twins


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("name", MODELS)
def test_it_is_the_decoder(name: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trees, chunks with and without logits and decodes, up to the largest pass that this processor takes, and beyond it."""
    model_type, config = MODELS[name]
    make_model(tmp_path, model_type, **config)
    twins = make_twins(tmp_path, dtype, pack=name != "not packed")
    model, max_rows, decoded = twins.runner.model, twins.runner.max_rows, []
    hidden_states = model.hidden_states
    monkeypatch.setattr(model, "hidden_states", lambda *args: decoded.append(args) or hidden_states(*args))
    for num_tokens in (1, 2, 3, 5, 5, FEW, FEW, 9, 16, 17, 32, 33, max_rows, max_rows + 1):
        query_lens = np.bincount(twins.rng.integers(0, 3, num_tokens))
        twins.run(twins.parts(query_lens[query_lens > 0].tolist(), have_chunks=True))
        assert (num_tokens <= max_rows) == (not decoded)
        decoded.clear()


def forward(twins: Twins, parts: list[Part]) -> Tensor:
    with torch.inference_mode():
        return twins.runner.forward(twins.batches(parts)[1])  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", BOUNDS)
def test_a_request_does_not_depend_on_its_neighbours(dtype: str, tmp_path: Path) -> None:
    """Bit by bit, also in bfloat16, as long as the pass is short."""
    make_model(tmp_path, "llama")
    twins = make_twins(tmp_path, dtype)
    parts = twins.parts([2, 2, 3, 1])
    together = forward(twins, parts)
    assert torch.equal(torch.cat([forward(twins, [part]) for part in parts]), together)


@pytest.mark.parametrize("head_dim", [16, 64])
@pytest.mark.parametrize("dtype", BOUNDS)
def test_a_chain_is_verified_as_it_would_be_decoded(dtype: str, head_dim: int, tmp_path: Path) -> None:
    """Bit by bit, wherever the context ends."""
    make_model(tmp_path, "llama", head_dim=head_dim)
    twins = make_twins(tmp_path, dtype)
    table, chain = twins.tables()[0], twins.tokens(FEW)
    for root in (0, 5, 29, 31, 56):
        decoded = [forward(twins, [(QueryRow(table, root + i, [token]), EMPTY_TREE)]) for i, token in enumerate(chain)]
        verified = forward(twins, [(QueryRow(table, root, chain[:1]), DraftTree.chain(chain[1:]))])
        assert torch.equal(verified, torch.cat(decoded))


def test_positions_without_rotation_are_refused(tmp_path: Path) -> None:
    make_model(tmp_path, "llama", max_position_embeddings=64)
    twins = make_twins(tmp_path, "float32")
    with pytest.raises(IndexError, match="64"):
        forward(twins, [(QueryRow(list(range(BLOCKS_PER_REQUEST + 1)), 64, [5]), EMPTY_TREE)])
