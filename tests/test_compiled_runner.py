"""Passes of few tokens in one call of C++, against the decoder operation by operation in PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from back_ends import make_back_end
from stepping import host_trees
from tiny_models import make_model

from titan.core.batch import QueryRow, RaggedBatch, build_batch
from titan.core.kv_tensor import KVTensor
from titan.core.trees import EMPTY_TREE, DraftTree
from titan.kernels.cpu.runner import CompiledRunner
from titan.kernels.interfaces import PassCounts, PassLimits
from titan.kernels.torch.runner import TorchRunner
from titan.models.decoder import Decoder
from titan.models.loader import load_model

CPU = torch.device("cpu")
Part = tuple[QueryRow, DraftTree]  # committed tokens, and what hangs at the last of them
BLOCK_SIZE, NUM_BLOCKS = 16, 24
LIMITS = PassLimits(num_requests=8, query_len=8, num_blocks=NUM_BLOCKS)
FEW = 8  # so many tokens make a short pass everywhere
BOUNDS = {"float32": 1e-5, "bfloat16": 4e-2}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "one_layer": ("llama", {"num_hidden_layers": 1}),
    "multi_query": ("llama", {"num_key_value_heads": 1}),
    "all_biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral_window": ("mistral", {"sliding_window": 3}),
    "qwen2_layers": ("qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    "qwen3_tied": ("qwen3", {"tie_word_embeddings": True, "head_dim": 32}),
}


def tokens(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 131, count).tolist()  # type: ignore[no-any-return]


def tables(count: int) -> list[list[int]]:
    order = np.random.default_rng(0).permutation(NUM_BLOCKS).tolist()
    return [order[i::count] for i in range(count)]


def part(table: list[int], start: int, token_ids: list[int], tree: DraftTree = EMPTY_TREE, *, needs_logits: bool = True) -> Part:
    return QueryRow(table, start, token_ids, needs_logits), tree


def batch_of(parts: Sequence[Part]) -> RaggedBatch:
    rows, trees = zip(*parts, strict=True)
    return build_batch(rows, host_trees(trees), block_size=BLOCK_SIZE)


def batches() -> dict[str, list[Part]]:
    """A decode; a chunk without logits beside a tree; chains; trees beside a decode."""
    one, two, three = tables(3)
    tree = DraftTree(np.array(tokens(4, 1)), np.array([-1, 0, -1, 1], np.int32))
    small = DraftTree(np.array(tokens(3, 7)), np.array([-1, -1, 0], np.int32))
    return {
        "decode": [part(one, 30, tokens(1, 2))],
        "mixed": [part(one, 5, tokens(2, 3), needs_logits=False), part(two, 20, tokens(1, 4), tree)],
        "chains": [part(t, s, tokens(2, s), DraftTree.chain([9])) for t, s in ((one, 3), (three, 9))],
        "trees": [part(three, 17, tokens(2, 8), small), part(one, 40, tokens(1, 5))],
        "nothing asked for": [part(two, 0, tokens(FEW, 6), needs_logits=False)],
    }


def make_runners(folder: Path, dtype: str, *, pack: bool = True) -> tuple[TorchRunner, CompiledRunner]:
    """The same model and KV, on PyTorch and compiled."""
    runners = []
    for name in ("torch", "cpu"):
        backend = make_back_end(name)
        model = load_model(str(folder), dtype=dtype, backend=backend, pack=pack)
        runners.append(backend.prepare(model, random_kv(model), LIMITS, PassCounts()))
    plain, compiled = runners
    assert type(plain) is TorchRunner
    if not isinstance(compiled, CompiledRunner):
        pytest.skip("a layout of this processor that the library does not read")
    return plain, compiled


def random_kv(model: Decoder) -> KVTensor:
    kv = KVTensor(model.kv_layout, NUM_BLOCKS, BLOCK_SIZE, CPU)
    for group in kv.groups:
        group.normal_(generator=torch.Generator().manual_seed(0))
    return kv


def assert_near(actual: torch.Tensor, expected: torch.Tensor, bound: float) -> None:
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    assert (actual - expected).float().norm() <= bound * expected.float().norm()


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("name", MODELS)
def test_it_is_the_decoder(name: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_type, config = MODELS[name]
    make_model(tmp_path, model_type, **{"num_hidden_layers": 3} | config)
    plain, compiled = make_runners(tmp_path, dtype)
    monkeypatch.setattr(compiled.model, "hidden_states", lambda *_: pytest.fail("the pass was not compiled"))
    for parts in batches().values():
        batch = batch_of(parts)
        assert len(batch.token_ids) <= FEW
        with torch.inference_mode():
            assert_near(compiled.forward(batch), plain.forward(batch), BOUNDS[dtype])
        assert_near(compiled.kv.groups[0], plain.kv.groups[0], BOUNDS[dtype])


@pytest.mark.parametrize("dtype", BOUNDS)
def test_a_request_does_not_depend_on_its_neighbours(dtype: str, tmp_path: Path) -> None:
    """Bit by bit, also in bfloat16, as long as the pass is short."""
    make_model(tmp_path, "llama")
    _, compiled = make_runners(tmp_path, dtype)
    parts = [part(table, 10 + i, tokens(2, i)) for i, table in enumerate(tables(4))]

    def run(some: Sequence[Part]) -> torch.Tensor:
        with torch.inference_mode():
            return compiled.forward(batch_of(some))

    together = run(parts)
    assert torch.equal(torch.cat([run([each]) for each in parts]), together)


@pytest.mark.parametrize("head_dim", [16, 64])
@pytest.mark.parametrize("dtype", BOUNDS)
def test_a_chain_is_verified_as_it_would_be_decoded(dtype: str, head_dim: int, tmp_path: Path) -> None:
    """Bit by bit, wherever the context ends."""
    make_model(tmp_path, "llama", head_dim=head_dim)
    _, compiled = make_runners(tmp_path, dtype)
    [table], chain = tables(1), tokens(FEW, 9)
    for root in (0, 5, 29, 31, 60):
        with torch.inference_mode():
            decoded = [compiled.forward(batch_of([part(table, root + i, [token])])) for i, token in enumerate(chain)]
            verified = compiled.forward(batch_of([part(table, root, chain[:1], DraftTree.chain(chain[1:]))]))
        assert torch.equal(verified, torch.cat(decoded))


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("num_tokens", [9, 16, 17, 32, 33, 64])
def test_passes_of_more_tokens_where_the_processor_takes_them(num_tokens: int, dtype: str, tmp_path: Path) -> None:
    make_model(tmp_path, "llama")
    plain, compiled = make_runners(tmp_path, dtype)
    if num_tokens > compiled.max_rows:
        pytest.skip(f"this processor takes {compiled.max_rows}")
    one, two = tables(2)
    tree = DraftTree(np.array(tokens(4, 1)), np.array([-1, 0, -1, 1], np.int32))
    batch = batch_of([part(one, 20, [5], DraftTree.chain(tokens(num_tokens - 6, 2))), part(two, 9, [7], tree)])
    with torch.inference_mode():
        for actual, expected in zip(compiled.forward(batch), plain.forward(batch), strict=True):
            assert_near(actual, expected, 2 * BOUNDS[dtype])  # of a single row


def test_longer_passes_are_the_decoders(tmp_path: Path) -> None:
    make_model(tmp_path, "llama")
    plain, compiled = make_runners(tmp_path, "float32")
    batch = batch_of([part(tables(1)[0], 0, tokens(compiled.max_rows + 1, 0))])
    with torch.inference_mode():
        assert_near(compiled.forward(batch), plain.forward(batch), 1e-5)


def test_positions_without_rotation_are_refused(tmp_path: Path) -> None:
    make_model(tmp_path, "llama", max_position_embeddings=64)
    _, compiled = make_runners(tmp_path, "float32")
    with pytest.raises(IndexError, match="64"):
        compiled.forward(batch_of([part(tables(1)[0], 64, [5])]))


@pytest.mark.parametrize("dtype", BOUNDS)
def test_plain_weights_are_read_too(dtype: str, tmp_path: Path) -> None:
    """As the head is that shares a large embedding."""
    make_model(tmp_path, "qwen2", hidden_size=72)
    plain, compiled = make_runners(tmp_path, dtype, pack=False)
    for parts in batches().values():
        batch = batch_of(parts)
        with torch.inference_mode():
            assert_near(compiled.forward(batch), plain.forward(batch), BOUNDS[dtype])
