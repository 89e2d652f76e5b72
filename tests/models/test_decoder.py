"""Every family held to transformers' logits, on small random models saved to disk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attention_cases import random_parents
from back_ends import cpu_backend
from families import GRANITE, LONGROPE, PART
from proposals import paths_of
from stepping import host_trees
from tiny_models import MODEL_TYPES, make_model, reference_logits
from torch import Tensor
from transformers import AutoModelForCausalLM
from zoo import LLAMA3_ROPE

from titan.bench.loading import load_decoder
from titan.core.batch import QueryRow, build_batch
from titan.core.kv_tensor import KVTensor
from titan.core.trees import EMPTY_TREE, DraftTree
from titan.kernels.cpu.weights import is_packed
from titan.kernels.interfaces import Model, PassCounts, PassLimits
from titan.models.decoder import Decoder
from titan.models.files import ModelFiles
from titan.models.loader import load_model, open_model
from titan.models.token_order import TokenOrder

BLOCK_SIZE = 16
NUM_BLOCKS = 24

ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 500.0},
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
    "llama3": LLAMA3_ROPE,
    "yarn": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, "rope_theta": 1000.0},
}

LONG_PART = LONGROPE | {"partial_rotary_factor": 0.5} | {name: LONGROPE[name][:4] for name in ("short_factor", "long_factor")}
ROPE_PER_LAYER = {"sliding_attention": {"rope_type": "default", "rope_theta": 500.0}, "full_attention": ROPES["yarn"]}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {model_type: (model_type, {}) for model_type in MODEL_TYPES} | {
    "granite": ("granite", GRANITE | {"rms_norm_eps": 0.1}),  # which shows how eps is scaled
    "gemma": ("gemma", {}),
    "gemma3": ("gemma3_text", {"rope_parameters": ROPE_PER_LAYER, "query_pre_attn_scalar": 40, "sliding_window_pattern": 2}),
    "phi3": ("phi3", {"rope_parameters": PART}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {"rope_parameters": ROPE_PER_LAYER}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0, 1]}),
}

WINDOWED = {"mistral", "qwen2", "qwen3", "phi3", "olmo3", "gemma3"}

SLIDING = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}
TYPES = {"num_hidden_layers": 3, "layer_types": ["full_attention", "sliding_attention", "full_attention"]}

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = (
    {f"llama_{rope}": ("llama", {"rope_parameters": dict(parameters)}) for rope, parameters in ROPES.items()}
    | FAMILIES
    | {
        "multi_head": ("llama", {"num_key_value_heads": 4}),
        "multi_query": ("llama", {"num_key_value_heads": 1}),
        "derived_head_dim": ("llama", {"head_dim": None}),
        "wide_heads": ("qwen3", {"head_dim": 32}),
        "tied_llama": ("llama", {"tie_word_embeddings": True}),
        "tied_qwen3": ("qwen3", {"tie_word_embeddings": True}),
        "llama_biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
        "qwen3_biases": ("qwen3", {"attention_bias": True}),
        "mistral_window": ("mistral", {"sliding_window": 7}),
        "mistral_no_window": ("mistral", {"sliding_window": None}),
        "ministral": ("ministral", TYPES | {"sliding_window": 7}),
        "qwen2_window": ("qwen2", SLIDING),
        "qwen3_window": ("qwen3", SLIDING),
        "qwen2_window_off": ("qwen2", {"sliding_window": 7, "use_sliding_window": False}),
        "granite_tied": ("granite", GRANITE | {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
        "phi3_whole_heads": ("phi3", {"sliding_window": 7}),
        "phi3_longrope": ("phi3", {"rope_parameters": LONG_PART, "original_max_position_embeddings": 128, "hidden_size": 64}),
        "gemma3_window": ("gemma3_text", {"sliding_window": 7, "sliding_window_pattern": 2, "tie_word_embeddings": True}),
        "olmo3_window": ("olmo3", TYPES | {"sliding_window": 7}),
        "smollm3_window": ("smollm3", {"use_sliding_window": True, "sliding_window": 7, "no_rope_layer_interval": 2}),
        "qwen3_layer_types": ("qwen3", SLIDING | {"layer_types": ["sliding_attention", "full_attention"]}),
    }
)


class Session:
    """One decoder, its KV, and requests that own blocks in scrambled order; passes of few tokens run as the engine runs them."""

    def __init__(self, model: Model, num_requests: int = 1) -> None:
        self.model = model
        kv = KVTensor(model.kv_layout, NUM_BLOCKS, BLOCK_SIZE, model.device)
        self.runner = cpu_backend().prepare(model, kv, PassLimits(num_requests, 64, NUM_BLOCKS, 256), PassCounts())
        order = np.random.default_rng(0).permutation(NUM_BLOCKS).tolist()
        self.block_ids = [order[i::num_requests] for i in range(num_requests)]

    def run(self, rows: Sequence[QueryRow], tree: DraftTree = EMPTY_TREE) -> Tensor:
        """One pass; the tree hangs at the last row."""
        trees = host_trees([EMPTY_TREE] * (len(rows) - 1) + [tree])
        logits = self.runner.forward(build_batch(rows, trees, block_size=BLOCK_SIZE))
        assert logits.dtype == self.model.dtype
        return logits.float()

    def feed(self, token_ids: list[int], start: int) -> Tensor:
        return self.run([QueryRow(self.block_ids[0], start, token_ids)])


def random_tokens(num_tokens: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, 131, num_tokens).tolist()  # type: ignore[no-any-return]


def random_tree(num_nodes: int) -> DraftTree:
    parents = random_parents(np.random.default_rng(0), num_nodes)
    return DraftTree(np.array(random_tokens(num_nodes, 1)), np.array(parents, np.int32))


def assert_close(logits: Tensor, expected: Tensor, bound: float = 1e-4) -> None:
    assert logits.shape == expected.shape
    assert (logits - expected).abs().max() <= bound * expected.abs().max()


def load(folder: Path, dtype: str = "float32", **options: Any) -> Decoder:
    return load_decoder(str(folder), dtype=dtype, backend=cpu_backend(), **options)


@pytest.mark.parametrize("name", CONFIGS)
def test_chunks_and_single_tokens_match_transformers(tmp_path: Path, name: str) -> None:
    """Prefill in two passes, then decoding, over scrambled blocks."""
    model_type, config = CONFIGS[name]
    reference = make_model(tmp_path, model_type, **config)
    token_ids = random_tokens(64)
    expected = reference_logits(reference, token_ids)
    session = Session(load(tmp_path))
    assert_close(session.feed(token_ids[:37], 0), expected[36:37])
    assert_close(session.feed(token_ids[37:60], 37), expected[59:60])
    for position in range(60, 64):
        assert_close(session.feed(token_ids[position : position + 1], position), expected[position : position + 1])


def test_mistral_with_layer_types_has_windows_in_some_layers(tmp_path: Path) -> None:
    """As the checkpoints of Ministral-8B have it, which transformers reads as Ministral."""
    make_model(tmp_path, "ministral", **TYPES, sliding_window=7)
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace("ministral", "mistral").replace("Ministral", "Mistral"))
    token_ids = random_tokens(40)
    expected = reference_logits(AutoModelForCausalLM.from_pretrained(tmp_path), token_ids)
    assert_close(Session(load(tmp_path)).feed(token_ids, 0), expected[-1:])


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_checkpoints_in_bfloat16_are_exact_in_float32(tmp_path: Path, family: str, is_tied: bool) -> None:
    model_type, config = FAMILIES[family]
    even = {"vocab_size": 160, "hidden_size": 64, "intermediate_size": 96, "tie_word_embeddings": is_tied}
    reference = make_model(tmp_path, model_type, **config, **even)
    for parameter in reference.parameters():
        parameter.data = parameter.bfloat16().float()
    reference.save_pretrained(tmp_path)
    token_ids = random_tokens(150)
    expected = reference_logits(reference, token_ids)
    model = load(tmp_path)
    session = Session(model)
    packed = [weight for weight in (model.head, model.layer_weights[0].qkv_weight, model.embedding) if is_packed(weight)]
    assert len(packed) == (2 + is_tied) * model.ops.packs  # a tied embedding is the head
    assert all(each.dtype in (torch.int32, torch.uint8) for each in packed), "pairs of bfloat16, or codes of them"
    assert_close(session.feed(token_ids[:100], 0), expected[99:100], 1e-5)
    assert_close(session.feed(token_ids[100:110], 100), expected[109:110], 1e-5)
    chain = DraftTree.chain(token_ids[111:])
    logits = session.run([QueryRow(session.block_ids[0], 110, token_ids[110:111])], chain)
    assert_close(logits, expected[110:], 1e-5)
    assert_close(session.feed(token_ids[149:], 149), expected[149:], 1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_decode_and_verification_share_a_pass(tmp_path: Path, family: str) -> None:
    """Every node of a tree gets the logits of its path, also where that leaves the window."""
    model_type, config = FAMILIES[family]
    window = {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 1} if family in WINDOWED else {}
    reference = make_model(tmp_path, model_type, **(config | window))
    chunk, decoded, verified = random_tokens(50, 1), random_tokens(21, 2), random_tokens(33, 3)
    tree = random_tree(12)
    session = Session(load(tmp_path), num_requests=4)
    blocks = session.block_ids
    before = ((blocks[1], decoded), (blocks[2], verified))
    silent = session.run([QueryRow(block_ids, 0, tokens[:-1], needs_logits=False) for block_ids, tokens in before])
    assert silent.shape == (0, 131)
    logits = session.run(
        [
            QueryRow(blocks[0], 0, chunk),
            QueryRow(blocks[1], 20, decoded[-1:]),
            QueryRow(blocks[3], 0, random_tokens(5, 4), needs_logits=False),
            QueryRow(blocks[2], 32, verified[-1:]),
        ],
        tree,
    )
    expected = [reference_logits(reference, token_ids)[-1] for token_ids in (chunk, decoded, verified)]
    expected += [reference_logits(reference, [*verified, *path])[-1] for path in paths_of(tree)]
    assert_close(logits, torch.stack(expected))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_half_precision_is_as_close_as_transformers_is(tmp_path: Path, family: str, dtype: str) -> None:
    model_type, config = FAMILIES[family]
    reference = make_model(tmp_path, model_type, **config)
    token_ids = random_tokens(60)
    expected = reference_logits(reference, token_ids)[39:]
    session = Session(load(tmp_path, dtype))
    session.feed(token_ids[:39], 0)
    chain = DraftTree.chain(token_ids[40:])
    logits = session.run([QueryRow(session.block_ids[0], 39, token_ids[39:40])], chain)
    theirs = reference_logits(reference.to(getattr(torch, dtype)), token_ids)[39:]
    assert (logits - expected).norm() <= 1.2 * (theirs - expected).norm()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", ["llama", "gemma", "gemma3", "olmo2", "olmo3"])
def test_norms_are_rounded_where_those_of_transformers_are(tmp_path: Path, family: str, dtype: str) -> None:
    """Up to the order of a sum: before the product with a weight, or after it."""
    model_type, config = FAMILIES[family]
    reference = make_model(tmp_path, model_type, **config).to(getattr(torch, dtype))
    reference.save_pretrained(tmp_path)
    model, layer = load(tmp_path, dtype), reference.model.layers[1]
    x = torch.randn(64, 48, generator=torch.Generator().manual_seed(0)).to(model.dtype)
    pairs = [
        (getattr(model.layer_weights[1], name), layer.get_submodule(source)) for name, source in model.config.family.norms.items()
    ]
    for weight, theirs in [*pairs, (model.final_norm, reference.model.norm)]:
        normed = model.ops.rms_norm(x, weight, model.config.rms_norm_eps)
        assert normed.dtype == model.dtype and (normed != theirs(x)).float().mean() < 0.002


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", ["gemma", "gemma3"])
def test_embeddings_are_scaled_as_those_of_transformers_are(tmp_path: Path, family: str, dtype: str, pack: bool) -> None:
    """The root of 48 is no number of 16 bits. Layers that add nothing, and a head of ones, show what the embedding became."""
    model_type, config = FAMILIES[family]
    reference = make_model(tmp_path, model_type, **config)
    for layer in reference.model.layers:
        layer.self_attn.o_proj.weight.data.zero_(), layer.mlp.down_proj.weight.data.zero_()
    reference.lm_head.weight.data = torch.eye(131, 48)
    reference.to(getattr(torch, dtype)).save_pretrained(tmp_path)
    token_ids = random_tokens(60)
    session = Session(load(tmp_path, dtype, pack=pack))
    session.feed(token_ids[:1], 0)
    logits = session.run([QueryRow(session.block_ids[0], 1, token_ids[1:2])], DraftTree.chain(token_ids[2:]))
    assert (logits != reference_logits(reference, token_ids)[1:]).float().mean() < 0.002


@pytest.mark.parametrize("is_tied", [False, True])
def test_weights_that_are_not_packed_match_transformers_too(tmp_path: Path, is_tied: bool) -> None:
    reference = make_model(tmp_path, tie_word_embeddings=is_tied, attention_bias=True)
    token_ids = random_tokens(30)
    assert_close(Session(load(tmp_path, pack=False)).feed(token_ids, 0), reference_logits(reference, token_ids)[-1:])


@pytest.mark.parametrize("model_impl", ["native", "transformers"])
@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("family", ["granite", "gemma", "gemma3", "qwen3"])
def test_a_reordered_vocabulary_has_the_same_logits_in_its_order(
    tmp_path: Path, family: str, is_tied: bool, model_impl: str
) -> None:
    """With the scales and offsets that are folded into weights; of the last tokens, there are no logits."""
    model_type, config = FAMILIES[family]
    reference = make_model(tmp_path, model_type, **config | {"tie_word_embeddings": is_tied})
    order = TokenOrder(torch.from_numpy(np.random.default_rng(1).permutation(131)), 100)
    model = load_model(open_model(ModelFiles(str(tmp_path)), model_impl), dtype="float32", backend=cpu_backend(), order=order)
    token_ids = random_tokens(30)
    logits = Session(model).feed(order.token_ids.argsort()[token_ids].tolist(), 0)
    assert_close(logits, reference_logits(reference, token_ids)[-1:, order.token_ids[:100]])


def test_positions_past_the_table_are_an_error(tmp_path: Path) -> None:
    make_model(tmp_path)
    session = Session(load(tmp_path))
    session.feed(random_tokens(256), 0)
    with pytest.raises(IndexError, match="positions 256 to 256 are not allowed: there are 256"):
        session.feed([3], 256)
