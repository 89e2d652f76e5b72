"""Families of causal language models, each with a tiny config in which what is peculiar to the family matters.

A row is a name, which is the model type and, after a colon, a variant; what the family has that a Llama has not; and what its
config has that `SIZES` has not. Windows and chunks are shorter than the longest prompts of the tests, soft caps are low enough to
bite, scales are not 1, and where a family has two kinds of layers, both are there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

VOCAB_SIZE = 131
WINDOW, CHUNK = 12, 16

EXPERTS = (
    {"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4}
    | {"num_experts_per_tok": 2, "moe_k": 2, "moe_topk": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
    | {"n_shared_experts": 1, "num_shared_experts": 1, "moe_num_shared_experts": 1}
    | {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "shared_intermediate_size": 32}
)
LATENTS = (
    {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
    | {"index_topk": 8, "index_head_dim": 16, "index_n_heads": 2}  # of what chooses among them
)
STATES = {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4} | {
    "mamba_n_heads": 8,
    "mamba_d_state": 16,
    "state_size": 16,
}
SIZES: dict[str, Any] = (
    {"vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "ffn_dim": 96, "num_hidden_layers": 4}
    | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rotary_dim": 8, "sliding_window": WINDOW}
    | {"max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    | EXPERTS
    | LATENTS
    | STATES
)
"""Sizes common to all, of which each config takes those that it has a field for."""

WINDOWED, FULL, CHUNKED, LINEAR = "sliding_attention", "full_attention", "chunked_attention", "linear_attention"
GLOBAL_LAST = [WINDOWED, WINDOWED, FULL]
MLA: dict[str, Any] = {"num_key_value_heads": 4, "head_dim": 8, "num_hidden_layers": 3}
CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 24}
GLOBAL_HEADS = {"global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True}
SHARED_KV = {"num_hidden_layers": 6, "layer_types": [*GLOBAL_LAST, WINDOWED, WINDOWED, FULL], "num_kv_shared_layers": 2} | {
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "hidden_size_per_layer_input": 8,
    "final_logit_softcapping": 3.0,
}
GRANITE = {"embedding_multiplier": 3.0, "logits_scaling": 0.4, "residual_multiplier": 0.6, "attention_multiplier": 0.15}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1000.0, "original_max_position_embeddings": 128}
LONGROPE |= {"short_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.5, 3.0, 4.0], "long_factor": [1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 9.0, 9.0]}
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 64}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1000.0, "factor": 2.0}
PART = {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.75}
LOCAL_ROPE, GLOBAL_ROPE = {"rope_type": "default", "rope_theta": 100.0}, {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}

Rows = dict[str, tuple[str, dict[str, Any]]]

NATIVE: Rows = {
    "gemma": ("scaled embedding, norms of 1 + weight", {"hidden_size": 48}),
    "gemma3_text": (
        "windows and rope per layer",
        {"hidden_size": 48, "num_hidden_layers": 3, "layer_types": GLOBAL_LAST, "query_pre_attn_scalar": 40}
        | {"rope_parameters": {WINDOWED: LOCAL_ROPE, FULL: GLOBAL_ROPE}},
    ),
    "granite": ("scales of embedding, residual, attention, logits", GRANITE),
    "llama": ("", {}),
    "llama:dynamic": ("rope that depends on the length", {"rope_parameters": DYNAMIC}),
    "llama:yarn": ("YaRN", {"rope_parameters": YARN}),
    "ministral": ("windows per layer", {"num_hidden_layers": 3, "layer_types": GLOBAL_LAST}),
    "mistral": ("windows", {}),
    "olmo2": ("norms after sublayers, of whole queries and keys", {}),
    "olmo3": ("windows per layer, norms after sublayers", {}),
    "phi3": ("fused QKV and gate; windows", {}),
    "phi3:longrope": (
        "rope that depends on the length",
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 128, "sliding_window": None},
    ),
    "phi3:part": ("rope of a part of each head", {"rope_parameters": PART, "sliding_window": None}),
    "qwen2": ("biases; windows in some layers", {"use_sliding_window": True, "max_window_layers": 2}),
    "qwen3": ("norms of queries and keys", {"tie_word_embeddings": True}),
    "smollm3": ("layers without rope", {"no_rope_layer_interval": 2}),
}

TRANSFORMERS: Rows = {
    # plain attention
    "apertus": ("xIELU, no gate", {}),
    "arcee": ("squared ReLU, no gate", {}),
    "aria_text": ("experts", {}),
    "bitnet": ("norms before output projections", {}),
    "biogpt": ("learned positions, scaled embedding", {}),
    "cohere": ("parallel layers, interleaved rope, logit scale", {"logit_scale": 0.5, "use_qk_norm": True}),
    "ctrl": ("sinusoidal positions", {"dff": 96}),
    "cwm": ("windows per layer", {"num_hidden_layers": 3, "layer_types": GLOBAL_LAST}),
    "ernie4_5": ("interleaved rope", {"use_bias": True}),
    "glm": ("partial interleaved rope", {}),
    "glm4": ("sandwich norms, partial rope", {}),
    "gpt-sw3": ("learned positions", {"num_hidden_layers": 2}),
    "gpt2": ("learned positions, LayerNorm, fused QKV", {"scale_attn_by_inverse_layer_idx": True}),
    "gpt_bigcode": ("one KV head, learned positions", {}),
    "gpt_neox": ("parallel layers, partial rope, fused QKV", {}),
    "helium": ("interleaved rope", {}),
    "hunyuan_v1_dense": ("norms of queries and keys after rope", {}),
    "hyperclovax": ("scales, norms after sublayers", GRANITE),
    "internlm3": ("biases", {"attention_bias": True, "mlp_bias": True}),
    "iquestcoder": ("", {}),
    "jais2": ("LayerNorm, squared ReLU, biases", {}),
    "ministral3": (
        "queries scaled by position",
        {"rope_parameters": YARN | {"llama_4_scaling_beta": 0.5, "original_max_position_embeddings": 16}},
    ),
    "moshi": ("gated activation in one matrix", {"ffn_dim": 192, "sliding_window": 256}),
    "nanochat": ("norms without weights, logit soft cap", {"final_logit_softcapping": 3.0}),
    "nemotron": ("LayerNorm of 1 + weight, squared ReLU, partial rope", {}),
    "olmo": ("LayerNorm without weights, clipped QKV", {"clip_qkv": 1.0}),
    "opt": ("learned positions with an offset", {}),
    "opt:post_norm": ("projected embedding, norms after sublayers", {"word_embed_proj_dim": 32, "do_layer_norm_before": False}),
    "persimmon": ("partial rope, norms of queries and keys, fused QKV", {}),
    "phi": ("parallel layers, partial rope", {"qk_layernorm": True, "num_key_value_heads": 2}),
    "seed_oss": ("biases", {"attention_out_bias": True}),
    "stablelm": ("LayerNorm, partial rope", {"use_qkv_bias": True}),
    "stablelm:parallel": (
        "parallel layers, norms of queries and keys",
        {"use_qkv_bias": True, "qk_layernorm": True, "use_parallel_residual": True},
    ),
    "starcoder2": ("LayerNorm, biases, no gate; windows", {}),
    # windows per layer
    "cohere2": ("windows per layer, rope only there", {"logit_scale": 0.5}),
    "exaone4": ("windows per layer, rope only there", {}),
    "gemma3n_text": (
        "shared KV, alternating updates, embeddings per layer",
        SHARED_KV | {"laurel_rank": 8, "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0, 0.0, 0.0]},
    ),
    "lfm3:attention": ("gated attention, sandwich norms", {"num_hidden_layers": 3, "layer_types": GLOBAL_LAST}),
    "modernbert-decoder": ("windows and rope per layer, LayerNorm without biases", {"local_attention": 2 * WINDOW}),
    # head sizes per layer
    "gemma4_text": (
        "head size, KV heads and rope per layer, shared KV, keys as values, experts",
        SHARED_KV | GLOBAL_HEADS | {"use_double_wide_mlp": True, "enable_moe_block": True, "top_k_experts": 2},
    ),
    "gemma4_unified_text": (
        "head size and rope per layer, keys as values",
        GLOBAL_HEADS | {"use_bidirectional_attention": None},
    ),
    # soft caps
    "gemma2": ("soft caps, windows per layer", CAPS),
    "vaultgemma": ("soft caps, windows per layer", CAPS),
    # sinks
    "gpt_oss": ("sinks, windows per layer, experts with biases", {}),
    "granite_swa": ("sinks, windows per layer", GRANITE),
    "granitemoe_swa": ("sinks, windows per layer, experts", GRANITE),
    "mimo_v2_flash": ("sinks, values narrower than keys, experts", {"head_dim": 24, "v_head_dim": 16}),
    # chunks
    "llama4_text": (
        "chunks, layers without rope and with attention scaled by position, experts",
        {"attention_chunk_size": CHUNK, "floor_scale": 8, "attn_scale": 0.5}
        | {"intermediate_size_mlp": 96, "interleave_moe_layer_step": 2},
    ),
    # latent attention
    "axk1": ("latent attention, experts", MLA),
    "deepseek_v2": (
        "latent attention, groups of experts",
        MLA | {"topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1, "routed_scaling_factor": 2.0},
    ),
    "deepseek_v2:lite": ("latent attention without a latent of queries, experts", MLA | {"q_lora_rank": None}),
    "deepseek_v3": ("latent attention, groups of experts", MLA | {"n_group": 2, "topk_group": 1, "n_routed_experts": 8}),
    "glm4_moe_lite": ("latent attention, experts", MLA),
    "longcat_flash": (
        "latent attention, two sublayers a layer, experts that do nothing",
        MLA
        | {"num_layers": 2, "ffn_hidden_size": 96, "expert_ffn_hidden_size": 32}
        | {"zero_expert_num": 2, "routed_scaling_factor": 2.0},
    ),
    "minicpm3": ("latent attention, scales", MLA | {"scale_emb": 3, "scale_depth": 1.4, "dim_model_base": 32}),
    "youtu": ("latent attention", MLA | {"pad_token_id": None}),
    # experts
    "afmoe": ("experts, windows per layer, gated attention", {"mup_enabled": True}),
    "beam": ("experts, windows per layer, logit soft cap", {"final_logit_softcapping": 3.0}),
    "cohere2_moe": ("experts, windows per layer", {"logit_scale": 0.5}),
    "dbrx": (
        "experts, clipped QKV",
        {"attn_config": {"kv_n_heads": 2, "clip_qkv": 1.0, "rope_theta": 1000.0}}
        | {"ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2}},
    ),
    "dots1": ("experts, windows per layer", {"max_window_layers": 2}),
    "ernie4_5_moe": ("experts, interleaved rope", {}),
    "exaone_moe": ("experts, windows per layer", {}),
    "flex_olmo": ("experts, norms after sublayers", {}),
    "flint": ("experts, windows per layer", {}),
    "glm4_moe": ("experts, partial rope", {"use_qk_norm": True}),
    "granitemoe": ("experts, scales", GRANITE),
    "granitemoehybrid:attention": (
        "attention in all layers, scales",
        GRANITE
        | {"layer_types": ["attention"] * 4, "mamba_d_head": 16, "num_local_experts": 0, "num_experts_per_tok": 0}
        | {"position_embedding_type": "rope"},
    ),
    "granitemoeshared": ("experts, one of them shared, scales", GRANITE),
    "hunyuan_v1_moe": ("experts, norms of queries and keys after rope", {}),
    "hy_v3": ("experts, norms of queries and keys", {}),
    "jetmoe": ("experts in attention as well", {"num_key_value_heads": 2}),
    "kolibri1": (
        "experts, windows per layer, rope only there, norms around sublayers",
        {"num_experts": 4, "num_hidden_layers": 3, "layer_types": GLOBAL_LAST},
    ),
    "laguna": ("experts, windows and gates per layer", {"num_hidden_layers": 3, "layer_types": GLOBAL_LAST}),
    "mellum": ("experts, windows per layer", {"num_hidden_layers": 3, "layer_types": GLOBAL_LAST}),
    "minimax_m2": ("experts, norms of whole queries and keys", {"rotary_dim": 8}),
    "mixtral": ("experts", {}),
    "olmoe": ("experts, clipped QKV, norms of whole queries and keys", {"clip_qkv": 1.0}),
    "phimoe": ("experts, LayerNorm, biases; windows", {"attention_bias": True, "lm_head_bias": True}),
    "qwen2_moe": ("experts, one of them shared and gated; windows", {"use_sliding_window": True, "max_window_layers": 2}),
    "qwen2_moe:unwindowed": ("experts, one of them shared and gated", {}),
    "qwen3_moe": ("experts, norms of queries and keys", {"num_local_experts": 4, "mlp_only_layers": [1]}),
    "solar_open": ("experts", {}),
}

TEXT_ONLY = "language model of one that takes images"
PATCHES = {"image_size": 28, "patch_size": 14}
QWEN_PATCHES = {"depth": 2, "embed_dim": 32, "num_heads": 2, "out_hidden_size": 64, "patch_size": 14}
ROTATED_PARTS = {"rope_type": "default", "rope_theta": 1000.0, "mrope_section": [2, 3, 3]}
QWEN = {"text_config": {"rope_parameters": ROTATED_PARTS}, "vision_config": QWEN_PATCHES} | {
    "image_token_id": 120,
    "video_token_id": 121,
    "vision_start_token_id": 122,
    "vision_end_token_id": 123,
}

COMPOSITE: Rows = {
    "cohere2_vision": (
        TEXT_ONLY,
        {
            "text_config": {"model_type": "cohere2", "logit_scale": 0.5},
            "vision_config": PATCHES | {"model_type": "siglip_vision_model"},
        },
    ),
    "gemma3": (
        TEXT_ONLY,
        {"text_config": NATIVE["gemma3_text"][1], "vision_config": PATCHES | {"model_type": "siglip_vision_model"}}
        | {"mm_tokens_per_image": 4, "image_token_index": 120},
    ),
    "gemma4": (TEXT_ONLY, {"text_config": TRANSFORMERS["gemma4_text"][1], "vision_config": PATCHES, "audio_config": None}),
    "glm4v": (TEXT_ONLY, QWEN),
    "got_ocr2": (
        f"{TEXT_ONLY}, whose own layers have no attention interface; windows",
        {"text_config": {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}}
        | {"vision_config": PATCHES | {"output_channels": 16}, "image_token_index": 120},
    ),
    "idefics3": (TEXT_ONLY, {"text_config": {"model_type": "llama"}, "vision_config": PATCHES, "image_token_id": 120}),
    "internvl": (
        TEXT_ONLY,
        {"text_config": {"model_type": "qwen2"}, "vision_config": {"image_size": [28, 28], "patch_size": [14, 14]}},
    ),
    "internvl:experts": (
        f"{TEXT_ONLY}; experts",
        {"text_config": {"model_type": "qwen3_moe"}, "vision_config": {"image_size": [28, 28], "patch_size": [14, 14]}},
    ),
    "llama4": (
        TEXT_ONLY,
        {"text_config": TRANSFORMERS["llama4_text"][1]}
        | {"vision_config": PATCHES | {"vision_output_dim": 64, "projector_input_dim": 64, "projector_output_dim": 64}},
    ),
    "llava": (
        TEXT_ONLY,
        {"text_config": {"model_type": "llama"}, "vision_config": PATCHES | {"model_type": "clip_vision_model"}}
        | {"image_token_index": 120},
    ),
    "mistral3": (TEXT_ONLY, {"text_config": {"model_type": "mistral"}, "vision_config": PATCHES | {"model_type": "pixtral"}}),
    "qwen2_vl": (TEXT_ONLY, QWEN),
    "qwen2_5_vl": (TEXT_ONLY, QWEN),
    "qwen3_vl": (TEXT_ONLY, QWEN),
    "qwen3_vl_moe": (f"{TEXT_ONLY}; experts", QWEN),
}

GATHERED: Rows = {
    "codegen": ("no attention interface", {}),
    "falcon": ("no attention interface; one KV head, parallel layers", {}),
    "falcon:new": ("no attention interface; grouped KV heads", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "gpt_neox_japanese": ("no attention interface", {}),
    "gptj": ("no attention interface; interleaved rope", {}),
    "llava:gptj": (
        f"{TEXT_ONLY}, without attention interface",
        {"text_config": {"model_type": "gptj"}, "vision_config": PATCHES | {"model_type": "clip_vision_model"}}
        | {"image_token_index": 120},
    ),
    "xglm": ("no attention interface; sinusoidal positions", {}),
}

ALIBI = "ALiBi"
STATE = "state"

REFUSED: dict[str, tuple[str, str, dict[str, Any]]] = {
    # name: what it has, a pattern of the message that refuses it, its config
    "bloom": ("ALiBi", ALIBI, {}),
    "falcon:alibi": ("ALiBi", ALIBI, {"alibi": True}),
    "mpt": ("ALiBi", ALIBI, {}),
    "diffllama": ("two softmaxes, subtracted", "several times", {}),
    "hrm_text": ("layers that run several times", "several times", {"prefix_lm": False}),
    "gpt_neo": (
        "windows of slots, not of positions",
        "counts slots",
        {"attention_types": [[["global", "local"], 2]], "window_size": WINDOW},
    ),
    "bart": (
        "a decoder that counts positions itself",
        "takes no position_ids",
        {"decoder_attention_heads": 4, "decoder_ffn_dim": 96, "is_encoder_decoder": False}
        | {"decoder_layers": 2, "encoder_layers": 2},
    ),
    "kosmos-2.5": (
        "positions counted from the padding token",
        "begin at 0",
        {"text_config": {"embed_dim": 64, "layers": 2, "attention_heads": 4}}
        | {"vision_config": {"num_hidden_layers": 1, "patch_embed_hidden_size": 32}, "latent_query_num": 4},
    ),
    "openai-gpt": ("no KV cache", "past_key_values", {"num_hidden_layers": 2}),
    "doge": ("mask that depends on the values", "mask", {"keep_window_size": 8}),
    "bamba": ("state space", STATE, {"attn_layer_indices": [1, 3], "mamba_d_head": 16}),
    "falcon_h1": ("state space beside attention", STATE, {"mamba_d_ssm": 64, "mamba_d_head": 8}),
    "falcon_mamba": ("state space", STATE, {}),
    "granitemoehybrid": ("state space", STATE, {"layer_types": [LINEAR, FULL, LINEAR, FULL], "mamba_d_head": 16}),
    "jamba": ("state space", STATE, {"attn_layer_period": 2, "attn_layer_offset": 1}),
    "lfm2": ("convolutions", STATE, {"full_attn_idxs": [1, 3]}),
    "lfm2_moe": ("convolutions, experts", STATE, {"layer_types": ["conv", FULL, "conv", FULL]}),
    "lfm3": ("convolutions, windows", STATE, {}),
    "mamba": ("state space", STATE, {}),
    "mamba2": ("state space", STATE, {"num_heads": 8, "n_groups": 2}),
    "minimax": ("linear attention", STATE, {"block_size": 8}),
    "nemotron_h": ("state space", STATE, {"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2}),
    "olmo_hybrid": ("linear attention", STATE, {}),
    "qwen3_5_text": ("linear attention", STATE, {}),
    "qwen3_5_moe_text": ("linear attention, experts", STATE, {}),
    "qwen3_next": ("linear attention, experts", STATE, {}),
    "recurrent_gemma": ("recurrent layers", STATE, {"attention_window_size": WINDOW, "lru_width": 64}),
    "rwkv": ("recurrent layers", STATE, {}),
    "zamba": ("state space", STATE, {"layers_block_type": [LINEAR, "hybrid", LINEAR, "hybrid"]}),
    "zamba2": ("state space", STATE, {"layers_block_type": [LINEAR, "hybrid", LINEAR, "hybrid"], "n_mamba_heads": 8}),
    "zaya": ("convolutions over queries and keys", STATE, {"num_experts_per_tok": 1, "router_hidden_size": 16}),
    "kimi_linear": ("linear attention", STATE, MLA | {"layer_types": [LINEAR, FULL, LINEAR], "linear_head_dim": 16}),
    "deepseek_v32": ("attention that chooses tokens", STATE, MLA),
    "deepseek_v4": ("compressed attention", STATE, {}),
    "glm_moe_dsa": ("attention that chooses tokens", STATE, MLA),
    "minimax_m3_vl_text": ("attention that chooses blocks", "block_indices", {}),
    "axk2": ("attention that chooses tokens", STATE, MLA),
    "hy_v4": ("attention that chooses tokens", STATE, MLA),
}

NOT_TRIED = {
    "decoder of a model with an encoder": (
        "bigbird_pegasus blenderbot blenderbot-small marian mbart mvp pegasus plbart prophetnet trocr whisper"
    ),
    "made to fill in masked words": (
        "bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert reformer rembert roberta "
        "roberta-prelayernorm roc_bert roformer xlm xlm-roberta xlm-roberta-xl xlnet xmod"
    ),
    "with images or sound; its language model is tried alone where it is a family of its own": (
        "dots3_note emu3 fuyu gemma3n gemma4_unified git mllama moss_transcribe_diarize musicgen "
        "musicgen_melody phi4_multimodal qwen3_5 qwen3_5_moe qwen4_exp"
    ),
    "drafts of one other model": "gemma4_assistant gemma4_unified_assistant",
    "no tiny config yet": (
        "bailing_hybrid blt cohere_compass_text cpmant dots3_note_text inkling2_text inkling_text qwen4_exp_text xlstm"
    ),
}
"""The other model types of transformers' mapping for causal language models, by reason."""

SEEDS = dict.fromkeys(("cohere2", "glm", "gpt-sw3", "lfm3:attention", "minicpm3", "ministral3", "mixtral", "qwen3"), 1)
SEEDS |= {"cohere2_vision": 1, "vaultgemma": 1, "xglm": 1, "gemma3_text": 2, "gpt2": 2, "opt": 3, "opt:post_norm": 4}
"""Seeds other than 0, of families whose continuations would have a near-tie, or few tokens."""


@dataclass(frozen=True, slots=True)
class Family:
    """A family and how it is expected to run: "native", "transformers", "gathered", or "refused" with a pattern of the message."""

    name: str
    notes: str
    config: Mapping[str, Any]
    runs: str
    refusal: str = ""

    @property
    def model_type(self) -> str:
        return self.name.partition(":")[0]

    @property
    def seed(self) -> int:
        return SEEDS.get(self.name, 0)


FAMILIES: dict[str, Family] = {
    **{name: Family(name, *row, "native") for name, row in NATIVE.items()},
    **{name: Family(name, *row, "transformers") for name, row in TRANSFORMERS.items()},
    **{name: Family(name, *row, "transformers") for name, row in COMPOSITE.items()},
    **{name: Family(name, *row, "gathered") for name, row in GATHERED.items()},
    **{name: Family(name, notes, config, "refused", refusal) for name, (notes, refusal, config) in REFUSED.items()},
}
