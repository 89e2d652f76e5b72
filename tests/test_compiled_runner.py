"""Passes in one call of C++, against the decoder operation by operation in PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from back_ends import KINDS, make_back_end, make_kernels
from tiny_models import make_model
from torch import Tensor
from twins import BLOCKS_PER_REQUEST, BOUNDS, NUM_BLOCKS, Part, Twins

from titan.core.batch import QueryRow
from titan.core.trees import EMPTY_TREE, DraftTree
from titan.kernels.cpu.backend import CpuBackend
from titan.kernels.cpu.compiled import address
from titan.kernels.cpu.runner import CompiledRunner

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "one_layer": ("llama", {"num_hidden_layers": 1}),
    "multi_query": ("llama", {"num_key_value_heads": 1}),
    "all_biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral_window": ("mistral", {"sliding_window": 3}),
    "qwen2_layers": ("qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    "gemma3": ("gemma3_text", {"sliding_window": 7, "sliding_window_pattern": 2}),
    "olmo3": ("olmo3", {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0, 1]}),
    "qwen3_tied": ("qwen3", {"tie_word_embeddings": True, "head_dim": 32}),
    "llama_tied": ("llama", {"tie_word_embeddings": True, "vocab_size": 160, "hidden_size": 64}),  # whole blocks
}
CASES = [
    (back_end, name, dtype)
    for i, back_end in enumerate(KINDS)
    for j, name in enumerate(MODELS)
    for k, dtype in enumerate(BOUNDS)
    if i == 0 or back_end == "cpu-amx" or (i + j + k) % 2
]
"""Kinds below the best one, but for emulated AMX, run each model in one dtype."""


def make_twins(folder: Path, dtype: str, back_end: str = "cpu") -> Twins:
    twins = Twins(folder, make_back_end(back_end), dtype)
    assert isinstance(twins.runner, CompiledRunner)
    return twins


@pytest.mark.parametrize(("back_end", "name", "dtype"), CASES)
def test_it_is_the_decoder(back_end: str, name: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trees, chunks with and without logits and decodes, in passes of any length."""
    model_type, config = MODELS[name]
    make_model(tmp_path, model_type, **config)
    twins = make_twins(tmp_path, dtype, back_end)
    monkeypatch.setattr(twins.runner.model, "hidden_states", None)  # nothing is done operation by operation
    for num_tokens in (1, 2, 3, 5, 5, 8, 8, 9, 16, 17, 32, 33, 64, 65, 100, 200):
        query_lens = np.bincount(twins.rng.integers(0, 3 if num_tokens < 60 else 6, num_tokens))
        twins.run(twins.parts(query_lens[query_lens > 0].tolist(), have_chunks=True))


def forward(twins: Twins, parts: list[Part]) -> Tensor:
    with torch.inference_mode():
        return twins.runner.forward(twins.batches(parts)[1])  # type: ignore[no-any-return]


@pytest.mark.parametrize("head_dim", [16, 40, 64])
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("back_end", KINDS)
def test_a_chain_is_verified_and_a_prompt_is_filled_as_it_would_be_decoded(
    back_end: str, dtype: str, head_dim: int, tmp_path: Path
) -> None:
    """Bit by bit, wherever the context ends and whoever is beside; of a prompt, the last row has logits."""
    make_model(tmp_path, head_dim=head_dim)
    twins = make_twins(tmp_path, dtype, back_end)
    table, beside = twins.tables()[:2]
    neighbour = QueryRow(beside, 20, twins.tokens(3)), DraftTree.chain(twins.tokens(4))
    for root, length in ((0, 40), (5, 8), (29, 8), (31, 20), (56, 8)):
        chain = twins.tokens(length)
        decoded = [forward(twins, [(QueryRow(table, root + i, [token]), EMPTY_TREE)]) for i, token in enumerate(chain)]
        verified = forward(twins, [(QueryRow(table, root, chain[:1]), DraftTree.chain(chain[1:])), neighbour])
        assert torch.equal(verified[:length], torch.cat(decoded))
        assert torch.equal(forward(twins, [(QueryRow(table, root, chain), EMPTY_TREE)]), decoded[-1])


def test_passes_do_not_depend_on_the_number_of_threads(tmp_path: Path) -> None:
    """Bit by bit, KV included."""
    make_model(tmp_path, vocab_size=2000, hidden_size=128, intermediate_size=500)
    one, three = (Twins(tmp_path, CpuBackend(make_kernels(KINDS["cpu"], num_threads))) for num_threads in (1, 3))
    for query_lens in ([1], [40, 3, 1, 60], [7] * 6) * 5:
        logits = [forward(twins, twins.parts(query_lens, have_chunks=True)) for twins in (one, three)]
        assert torch.equal(*logits) and torch.equal(one.kvs[1].view(torch.int32), three.kvs[1].view(torch.int32))


@pytest.mark.parametrize("query_lens", [[60, 5], [60] * 10])
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("back_end", KINDS)
def test_parts_of_long_passes_fit_into_the_working_memory(back_end: str, dtype: str, query_lens: list[int], tmp_path: Path) -> None:
    """Rows of a pass and those of its logits are divided into parts, of which those of fewer rows may be larger."""
    make_model(tmp_path, num_hidden_layers=1, intermediate_size=2048).bfloat16().save_pretrained(tmp_path)  # packed as pairs
    twins = make_twins(tmp_path, dtype, back_end)
    blocks = twins.rng.permutation(NUM_BLOCKS).tolist()
    rows = []
    for i, query_len in enumerate(query_lens):
        of_prompt = range(int(i == 0), query_len - 1)  # all but one
        table = blocks[i * BLOCKS_PER_REQUEST : (i + 1) * BLOCKS_PER_REQUEST]
        rows.append(QueryRow(table, 0, twins.tokens(query_len), prompt_logits=of_prompt))
    twins.run([(row, EMPTY_TREE) for row in rows])


def test_tokens_beyond_the_vocabulary_are_read_as_the_nearest(tmp_path: Path) -> None:
    """Drafters answer for the tokens of their `DraftTrees`; whatever these are, no other memory is read."""
    for is_tied in (False, True):
        make_model(tmp_path, tie_word_embeddings=is_tied)
        twins = make_twins(tmp_path, "float32")
        vocab_size, row = twins.runner.model.config.vocab_size, QueryRow(twins.tables()[0], 3, [5])
        batch = twins.batches([(row, DraftTree.chain([vocab_size - 1, 7]))])[1]
        expected = twins.runner.forward(batch)
        assert batch.nodes is not None
        batch.nodes.token_ids[0] = vocab_size + 1
        assert torch.equal(twins.runner.forward(batch), expected) and batch.token_ids[1] == vocab_size + 1


def test_arrays_that_the_library_would_misread_are_refused() -> None:
    numbers = np.arange(6)
    assert address(numbers) == numbers.ctypes.data
    numbers.flags.writeable = False
    assert address(numbers) == numbers.ctypes.data
    with pytest.raises(TypeError, match="float64 is not allowed"):
        address(numbers.astype(np.float64))
    for strided in (numbers[::2], np.arange(6)[::2]):
        with pytest.raises((TypeError, BufferError), match=r"side by side|contiguous"):
            address(strided)


def test_threads_are_not_taken_from_a_pass_when_python_ends() -> None:
    """A thread that does not end with Python may be in one."""
    finalizer = make_kernels(KINDS["cpu"]).finalizer
    assert not finalizer.atexit
