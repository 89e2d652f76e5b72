// Short passes of a decoder: one call for what `titan/models/decoder.py` does operation by operation.

#pragma once

#include <chrono>
#include <vector>

#include "attention.h"
#include "layer.h"
#include "linear.h"
#include "numbers.h"

extern "C" {

struct DecoderLayer {
  const void* input_norm; // [hidden_size]
  const void* post_norm;  // [hidden_size]
  const void* qk_norm;    // [num_heads + num_kv_heads, head_dim], or null
  Weight qkv;
  Weight output;
  Weight gate_up;
  Weight down;
  void* kv; // [2, num_kv_heads, num_slots, head_dim]
  int64_t window;
};

struct Decoder {
  int64_t num_layers;
  int64_t hidden_size;
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_dim;
  float eps;
  float scale;
  const void* embedding;  // [vocab_size, hidden_size]
  const void* rope_table; // [max_positions, 2, head_dim]
  const void* final_norm; // [hidden_size]
  const DecoderLayer* layers;
  double* attention_seconds; // passes add the time of their attention to it
  Weight head;
};

// T tokens, of which L need logits.
struct DecoderPass {
  int64_t num_tokens;
  int64_t num_rows;
  const int64_t* token_ids;     // [T]
  const int64_t* positions;     // [T]
  const int64_t* slot_mapping;  // [T]
  const int64_t* rows;          // [L], ascending
  const int64_t* ancestor_bits; // [T]
  int64_t num_slots;
};
}

namespace {

// Move the rows that need logits to the front of [T, size].
template <typename T>
void keep_rows(const DecoderPass& pass, int64_t size, T* values) {
  for (int64_t i = 0; i < pass.num_rows; ++i)
    if (pass.rows[i] != i) std::memcpy(values + i * size, values + pass.rows[i] * size, size * sizeof(T));
}

// Compute the logits of the rows that need them: [L, vocab_size].
template <typename T>
void forward(const Decoder& decoder, const AttentionPlan& plan, const DecoderPass& pass, T* logits) {
  const int64_t num_tokens = pass.num_tokens, size = decoder.hidden_size, head_dim = decoder.head_dim;
  const int64_t head_stride = pass.num_slots * head_dim;
  const int64_t q_size = decoder.num_heads * head_dim, qkv_size = q_size + 2 * decoder.num_kv_heads * head_dim;
  static thread_local std::vector<Line> buffer;
  int64_t widest = 0;
  for (int64_t i = 0; i < decoder.num_layers; ++i) widest = std::max(widest, decoder.layers[i].gate_up.num_outputs);
  buffer.resize(num_lines<T>(num_tokens * (2 * size + qkv_size + q_size + widest + widest / 2)));
  T* stream = reinterpret_cast<T*>(buffer.data()); // the residual stream
  T* normed = stream + num_tokens * size;
  T* qkv = normed + num_tokens * size;
  T* attended = qkv + num_tokens * qkv_size;
  T* gate_up = attended + num_tokens * q_size;
  T* gated = gate_up + num_tokens * widest;

  for (int64_t i = 0; i < num_tokens; ++i)
    std::memcpy(stream + i * size, static_cast<const T*>(decoder.embedding) + pass.token_ids[i] * size, size * sizeof(T));
  int64_t num_rows = num_tokens;
  for (int64_t i = 0; i < decoder.num_layers; ++i) {
    const DecoderLayer& layer = decoder.layers[i];
    T* kv_layer = static_cast<T*>(layer.kv);
    rms_norm(stream, static_cast<const T*>(layer.input_norm), normed, num_tokens, size, decoder.eps);
    linear<T>(layer.qkv, normed, num_tokens, nullptr, qkv);
    rope_and_write_kv(qkv, static_cast<const T*>(decoder.rope_table), pass.positions, pass.slot_mapping, kv_layer, head_stride,
                      static_cast<const T*>(layer.qk_norm), decoder.eps, num_tokens, decoder.num_heads, decoder.num_kv_heads,
                      head_dim);
    const auto start = std::chrono::steady_clock::now();
    tree_attention(plan, qkv, qkv_size, kv_layer, head_stride, pass.ancestor_bits, attended, decoder.scale, layer.window);
    *decoder.attention_seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    if (i + 1 == decoder.num_layers) { // the other rows have written their KV, and are not needed any more
      keep_rows(pass, size, stream);
      keep_rows(pass, q_size, attended);
      num_rows = pass.num_rows;
    }
    linear(layer.output, attended, num_rows, stream, stream);
    rms_norm(stream, static_cast<const T*>(layer.post_norm), normed, num_rows, size, decoder.eps);
    linear<T>(layer.gate_up, normed, num_rows, nullptr, gate_up);
    silu_mul(gate_up, gated, num_rows, layer.down.num_inputs);
    linear(layer.down, gated, num_rows, stream, stream);
  }
  rms_norm(stream, static_cast<const T*>(decoder.final_norm), normed, num_rows, size, decoder.eps);
  linear<T>(decoder.head, normed, num_rows, nullptr, logits);
}

} // namespace

#define TITAN_DEFINE_DECODER(T, NAME)                                                                                          \
  extern "C" void forward_##NAME(const Decoder* decoder, const AttentionPlan* plan, const DecoderPass* pass, void* logits) {   \
    forward(*decoder, *plan, *pass, static_cast<T*>(logits));                                                                  \
  }
