"""Passes of few tokens in one call of C++, against the decoder operation by operation in PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cpu_kernels import choose_cpu_kernels
from tiny_models import make_model

from titan.core.trees import DraftTree
from titan.execute.batch import Segment, build_batch
from titan.execute.model_runner import ModelRunner
from titan.kernels.cpu.library import usable_library
from titan.kernels.cpu.runner import CompiledRunner, make_compiled_runner
from titan.memory.kv_cache import allocate_kv
from titan.models.decoder import Decoder
from titan.models.loader import load_model

CPU = torch.device("cpu")
BLOCK_SIZE, NUM_BLOCKS = 16, 24
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


def batches() -> dict[str, list[Segment]]:
    """A decode; a chunk without logits beside a tree; chains; nodes of a draft alone."""
    one, two, three = tables(3)
    tree = DraftTree(np.array(tokens(4, 1)), np.array([-1, 0, -1, 1], np.int32))
    return {
        "decode": [Segment(one, 30, tokens(1, 2))],
        "mixed": [Segment(one, 5, tokens(2, 3), needs_logits=False), Segment(two, 20, tokens(1, 4), tree, root_position=20)],
        "chains": [Segment(t, s, tokens(2, s), DraftTree.chain([9]), root_position=s + 1) for t, s in ((one, 3), (three, 9))],
        "nodes": [Segment(three, 0, [], tree, first_node=2, root_position=17), Segment(one, 40, tokens(1, 5))],
        "nothing asked for": [Segment(two, 0, tokens(FEW, 6), needs_logits=False)],
    }


def make_runners(folder: Path, dtype: str, monkeypatch: pytest.MonkeyPatch) -> tuple[ModelRunner, CompiledRunner]:
    """The same model and KV, on PyTorch and compiled."""
    if usable_library() is None:
        pytest.skip("no C++ compiler")
    compiled = make_compiled_runner(model := load_model(str(folder), dtype=dtype, device=CPU), random_kv(model))
    if compiled is None:
        pytest.skip("a layout of this processor that the library does not read")
    choose_cpu_kernels(monkeypatch, "torch")
    plain = load_model(str(folder), dtype=dtype, device=CPU)
    assert make_compiled_runner(plain, random_kv(plain)) is None
    return ModelRunner(plain, random_kv(plain)), compiled


def random_kv(model: Decoder) -> torch.Tensor:
    config = model.config
    kv = allocate_kv(config.num_layers, NUM_BLOCKS, config.num_kv_heads, BLOCK_SIZE, config.head_dim, model.dtype, device=CPU)
    return kv.normal_(generator=torch.Generator().manual_seed(0))


def assert_near(actual: torch.Tensor, expected: torch.Tensor, bound: float) -> None:
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    assert (actual - expected).float().norm() <= bound * expected.float().norm()


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("name", MODELS)
def test_it_is_the_decoder(name: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_type, config = MODELS[name]
    make_model(tmp_path, model_type, **{"num_hidden_layers": 3} | config)
    plain, compiled = make_runners(tmp_path, dtype, monkeypatch)
    monkeypatch.setattr(compiled.model, "hidden_states", lambda *_: pytest.fail("the pass was not compiled"))
    for segments in batches().values():
        batch = build_batch(segments, block_size=BLOCK_SIZE)
        assert len(batch.token_ids) <= FEW
        with torch.inference_mode():
            assert_near(compiled.forward(batch), plain.forward(batch), BOUNDS[dtype])
        assert_near(compiled.kv, plain.kv, BOUNDS[dtype])


@pytest.mark.parametrize("dtype", BOUNDS)
def test_a_request_does_not_depend_on_its_neighbours(dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit by bit, also in bfloat16, as long as the pass is short."""
    make_model(tmp_path, "llama")
    _, compiled = make_runners(tmp_path, dtype, monkeypatch)
    segments = [Segment(table, 10 + i, tokens(2, i)) for i, table in enumerate(tables(4))]

    def run(some: Sequence[Segment]) -> torch.Tensor:
        with torch.inference_mode():
            return compiled.forward(build_batch(some, block_size=BLOCK_SIZE))

    together = run(segments)
    assert torch.equal(torch.cat([run([segment]) for segment in segments]), together)


@pytest.mark.parametrize("head_dim", [16, 64])
@pytest.mark.parametrize("dtype", BOUNDS)
def test_a_chain_is_verified_as_it_would_be_decoded(
    dtype: str, head_dim: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit by bit, wherever the context ends."""
    make_model(tmp_path, "llama", head_dim=head_dim)
    _, compiled = make_runners(tmp_path, dtype, monkeypatch)
    [table], chain = tables(1), tokens(FEW, 9)
    for root in (0, 5, 29, 31, 60):
        verification = Segment(table, root, chain[:1], DraftTree.chain(chain[1:]), root_position=root)
        with torch.inference_mode():
            decoded = [
                compiled.forward(build_batch([Segment(table, root + i, [token])], block_size=BLOCK_SIZE))
                for i, token in enumerate(chain)
            ]
            verified = compiled.forward(build_batch([verification], block_size=BLOCK_SIZE))
        assert torch.equal(verified, torch.cat(decoded))


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("num_tokens", [9, 16, 17, 32, 33, 64])
def test_passes_of_more_tokens_where_the_processor_takes_them(
    num_tokens: int, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model(tmp_path, "llama")
    plain, compiled = make_runners(tmp_path, dtype, monkeypatch)
    if num_tokens > compiled.max_rows:
        pytest.skip(f"this processor takes {compiled.max_rows}")
    one, two = tables(2)
    tree = DraftTree(np.array(tokens(4, 1)), np.array([-1, 0, -1, 1], np.int32))
    chain = DraftTree.chain(tokens(num_tokens - 6, 2))
    segments = [Segment(one, 20, [5], chain, root_position=20), Segment(two, 9, [7], tree, root_position=9)]
    batch = build_batch(segments, block_size=BLOCK_SIZE)
    with torch.inference_mode():
        for actual, expected in zip(compiled.forward(batch), plain.forward(batch), strict=True):
            assert_near(actual, expected, 2 * BOUNDS[dtype])  # of a single row


def test_longer_passes_are_the_decoders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model(tmp_path, "llama")
    plain, compiled = make_runners(tmp_path, "float32", monkeypatch)
    batch = build_batch([Segment(tables(1)[0], 0, tokens(compiled.max_rows + 1, 0))], block_size=BLOCK_SIZE)
    with torch.inference_mode():
        assert_near(compiled.forward(batch), plain.forward(batch), 1e-5)


def test_positions_without_rotation_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model(tmp_path, "llama", max_position_embeddings=64)
    _, compiled = make_runners(tmp_path, "float32", monkeypatch)
    with pytest.raises(IndexError, match="64"):
        compiled.forward(build_batch([Segment(tables(1)[0], 64, [5])], block_size=BLOCK_SIZE))


@pytest.mark.parametrize("dtype", BOUNDS)
def test_plain_weights_are_read_too(dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the head is that shares a large embedding."""
    make_model(tmp_path, "qwen2", hidden_size=72)
    plain, _ = make_runners(tmp_path, dtype, monkeypatch)
    choose_cpu_kernels(monkeypatch, "auto")
    model = load_model(str(tmp_path), dtype=dtype, device=CPU, pack=False)
    compiled = make_compiled_runner(model, random_kv(model))
    assert compiled is not None
    for segments in batches().values():
        batch = build_batch(segments, block_size=BLOCK_SIZE)
        with torch.inference_mode():
            assert_near(compiled.forward(batch), plain.forward(batch), BOUNDS[dtype])
