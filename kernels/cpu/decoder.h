// Passes of a decoder: one call for what `titan/models/decoder.py` does operation by operation.

#pragma once

#include <vector>

#include "attention.h"
#include "layer.h"
#include "linear.h"
#include "numbers.h"
#include "team.h"

extern "C" {

struct DecoderLayer {
  // Norms, or null: [hidden_size], of what attention and feed-forward part read, and of what they add to the residual stream;
  // [num_heads + num_kv_heads, head_dim], of each head of queries and keys, or of all queries and of all keys of a token.
  const void* input_norm;
  const void* gate_up_norm;
  const void* output_norm;
  const void* down_norm;
  const void* qk_norm;
  const void* row_norm;
  const void* rope_table; // [max_positions, 2, head_dim]
  Weight qkv;
  Weight output;
  Weight gate_up;
  Weight down;
  KVLayer kv;
  AttentionSpec attention; // heads and their dimensions are the same in all layers
};

struct Decoder {
  int64_t num_layers;
  int64_t hidden_size;
  int64_t vocab_size; // of the embedding; the head may be of the first tokens alone
  int64_t has_gelu;   // in place of SiLU
  float eps;
  float embedding_scale;
  const void* embedding;  // [vocab_size, hidden_size], or null if it is the head
  const void* final_norm; // [hidden_size]
  const DecoderLayer* layers;
  void* team; // of threads
  Weight head;
};

// T tokens, of which L need logits.
struct DecoderPass {
  int64_t num_tokens;
  int64_t num_rows;
  const int64_t* token_ids;    // [T]
  const int64_t* slot_mapping; // [T]
  const int64_t* rows;         // [L], ascending
};
}

namespace {

// Copy a token's row of the embedding, scaled, to `result`.
template <typename T>
void look_up(const Decoder& decoder, int64_t token, T* result) {
  const int64_t size = decoder.hidden_size;
  if (decoder.embedding)
    std::memcpy(result, static_cast<const T*>(decoder.embedding) + token * size, size * sizeof(T));
  else
    unpack_row(decoder.head, token, result);
  if (decoder.embedding_scale != 1.0f)
    for (int64_t d = 0; d < size; ++d) narrow(widen(result[d]) * decoder.embedding_scale, &result[d]);
}

// Compute the logits of the rows that need them: [L, vocab_size].
template <typename T>
void forward(const Decoder& decoder, const AttentionPlan& plan, const DecoderPass& pass, T* logits) {
  const AttentionSpec& heads = decoder.layers[0].attention;
  const int64_t num_tokens = pass.num_tokens, size = decoder.hidden_size;
  const int64_t q_size = heads.num_heads * heads.head_dim, k_size = heads.num_kv_heads * heads.head_dim, qkv_size = q_size + 2 * k_size;
  int64_t widest = 0, num_room = linear_lines<T>(decoder.head, pass.num_rows);
  for (int64_t i = 0; i < decoder.num_layers; ++i) {
    const DecoderLayer& layer = decoder.layers[i];
    widest = std::max(widest, layer.gate_up.num_outputs);
    for (const Weight* weight : {&layer.qkv, &layer.output, &layer.gate_up, &layer.down})
      num_room = std::max(num_room, linear_lines<T>(*weight, num_tokens));
  }
  static thread_local std::vector<Line> buffer;
  buffer.resize(num_room + num_lines<T>(num_tokens * (3 * size + qkv_size + 2 * q_size + widest + widest / 2)));
  Line* room = buffer.data();
  T* stream = reinterpret_cast<T*>(room + num_room); // the residual stream
  T* normed = stream + num_tokens * size;
  T* qkv = normed + num_tokens * size;
  T* attended = qkv + num_tokens * qkv_size;
  T* gate_up = attended + num_tokens * q_size;
  T* gated = gate_up + num_tokens * widest;
  T* kept_stream = gated + num_tokens * widest / 2; // of the rows that need logits
  T* kept_attended = kept_stream + num_tokens * size;
  Team& team = *static_cast<Team*>(decoder.team);
  const std::vector<AttentionItem> items = attention_items(plan, heads, team.num_threads());

  team.run([&](Member& member) {
    T *x = stream, *input = attended;
    int64_t num_rows = num_tokens;
    const auto read = [&](const void* norm) -> const T* { // what a part of a layer reads
      if (!norm) return x;
      rms_norm(member, x, static_cast<const T*>(norm), normed, num_rows, size, decoder.eps);
      return normed;
    };
    const auto add = [&](const Weight& weight, const T* rows, const void* norm) { // what a part of a layer adds to the stream
      if (!norm) return linear(member, weight, rows, num_rows, x, x, room);
      linear<T>(member, weight, rows, num_rows, nullptr, normed, room);
      add_norm(member, normed, static_cast<const T*>(norm), x, num_rows, size, decoder.eps);
    };
    member.share(num_tokens, size, [&](int64_t i) { look_up(decoder, pass.token_ids[i], stream + i * size); });
    for (int64_t i = 0; i < decoder.num_layers; ++i) {
      const DecoderLayer& layer = decoder.layers[i];
      linear<T>(member, layer.qkv, read(layer.input_norm), num_tokens, nullptr, qkv, room);
      if (layer.row_norm)
        norm_rows(member, qkv, qkv_size, static_cast<const T*>(layer.row_norm), q_size, k_size, num_tokens, decoder.eps);
      rope_and_write_kv(member, qkv, static_cast<const T*>(layer.rope_table), plan.positions, pass.slot_mapping, layer.kv,
                        static_cast<const T*>(layer.qk_norm), decoder.eps, num_tokens, heads.num_heads, heads.num_kv_heads, heads.head_dim);
      tree_attention(member, plan, layer.attention, items, qkv, qkv_size, layer.kv, attended);
      if (i + 1 == decoder.num_layers && pass.num_rows < num_tokens) { // the other rows have written their KV: they are done
        member.share(pass.num_rows, size + q_size, [&](int64_t row) {
          std::memcpy(kept_stream + row * size, stream + pass.rows[row] * size, size * sizeof(T));
          std::memcpy(kept_attended + row * q_size, attended + pass.rows[row] * q_size, q_size * sizeof(T));
        });
        x = kept_stream, input = kept_attended, num_rows = pass.num_rows;
      }
      add(layer.output, input, layer.output_norm);
      linear<T>(member, layer.gate_up, read(layer.gate_up_norm), num_rows, nullptr, gate_up, room);
      (decoder.has_gelu ? gate<gelu, T> : gate<silu, T>)(member, gate_up, gated, num_rows, layer.down.num_inputs);
      add(layer.down, gated, layer.down_norm);
    }
    linear<T>(member, decoder.head, read(decoder.final_norm), num_rows, nullptr, logits, room);
  });
  give_back(buffer);
}

} // namespace

#define TITAN_DEFINE_DECODER(T, NAME)                                                                                          \
  extern "C" void forward_##NAME(const Decoder* decoder, const AttentionPlan* plan, const DecoderPass* pass, void* logits) {   \
    forward(*decoder, *plan, *pass, static_cast<T*>(logits));                                                                  \
  }
