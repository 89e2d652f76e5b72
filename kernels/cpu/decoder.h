// Passes of a decoder: one call for what `titan/models/decoder.py` does operation by operation.

#pragma once

#include <vector>

#include "attention.h"
#include "layer.h"
#include "linear.h"
#include "numbers.h"
#include "team.h"
#include "working_memory.h"

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

namespace {

// Copy a token's row of the embedding, scaled, to `result`; of a token that there is not, that of the nearest.
template <typename T>
void look_up(const Decoder& decoder, int64_t token, T* result) {
  const int64_t size = decoder.hidden_size, row = std::clamp<int64_t>(token, 0, decoder.vocab_size - 1);
  if (decoder.embedding)
    std::memcpy(result, static_cast<const T*>(decoder.embedding) + row * size, size * sizeof(T));
  else
    unpack_row(decoder.head, row, result);
  if (decoder.embedding_scale != 1.0f)
    for (int64_t d = 0; d < size; ++d) narrow(widen(result[d]) * decoder.embedding_scale, &result[d]);
}

// Compute the logits of the rows that need them: [L, vocab_size].
template <typename T>
void forward(const Decoder& decoder, const AttentionPlan& plan, const DecoderPass& pass, T* logits) {
  const AttentionSpec& heads = decoder.layers[0].attention;
  const int64_t num_tokens = pass.num_tokens, most_rows = std::min(num_tokens, kPartRows), size = decoder.hidden_size;
  const int64_t q_size = heads.num_heads * heads.head_dim, k_size = heads.num_kv_heads * heads.head_dim, qkv_size = q_size + 2 * k_size;
  int64_t widest = 0, num_room = linear_lines<T>(decoder.head, pass.num_rows);
  for (int64_t i = 0; i < decoder.num_layers; ++i) {
    const DecoderLayer& layer = decoder.layers[i];
    widest = std::max(widest, layer.gate_up.num_outputs);
    for (const Weight* weight : {&layer.qkv, &layer.output, &layer.gate_up, &layer.down})
      num_room = std::max(num_room, linear_lines<T>(*weight, most_rows));
  }
  static thread_local WorkingMemory memory;
  const int64_t per_token = size + qkv_size + q_size, per_row = widest + widest / 2, per_logits = 2 * size + q_size;
  Line* room = memory.lines(num_room + num_lines<T>(num_tokens * per_token + most_rows * (size + per_row) + pass.num_rows * per_logits));
  T* stream = reinterpret_cast<T*>(room + num_room); // the residual stream
  T* qkv = stream + num_tokens * size;
  T* attended = qkv + num_tokens * qkv_size;
  T* kept_stream = attended + num_tokens * q_size; // of the rows that need logits
  T* kept_attended = kept_stream + pass.num_rows * size;
  T* last_normed = kept_attended + pass.num_rows * q_size;
  T* normed = last_normed + pass.num_rows * size; // of some rows, as what follows
  T* gate_up = normed + most_rows * size;
  T* gated = gate_up + most_rows * widest;
  Team& team = *static_cast<Team*>(decoder.team);
  const std::vector<AttentionItem> items = attention_items(plan, heads, team.num_threads());

  team.run([&](Member& member) {
    const auto norm = [&](const T* x, const void* weight, T* result, int64_t count) -> const T* { // what a part of a layer reads
      if (!weight) return x;
      rms_norm(member, x, static_cast<const T*>(weight), result, count, size, decoder.eps);
      return result;
    };
    const auto add = [&](const Weight& weight, const T* rows, const void* norm, T* x, int64_t count) { // to the stream
      if (!norm) return linear(member, weight, rows, count, x, x, room);
      linear<T>(member, weight, rows, count, nullptr, normed, room);
      add_norm(member, normed, static_cast<const T*>(norm), x, count, size, decoder.eps);
    };
    T *stream_rows = stream, *attended_rows = attended;
    int64_t num_rows = num_tokens;
    member.share(num_tokens, size, [&](int64_t i) { look_up(decoder, pass.token_ids[i], stream + i * size); });
    for (int64_t i = 0; i < decoder.num_layers; ++i) {
      const DecoderLayer& layer = decoder.layers[i];
      for_parts(num_tokens, kPartRows, [&](int64_t first, int64_t count) {
        T* rows = qkv + first * qkv_size;
        linear<T>(member, layer.qkv, norm(stream + first * size, layer.input_norm, normed, count), count, nullptr, rows, room);
        rope_and_write_kv(member, rows, static_cast<const T*>(layer.rope_table), plan.positions + first, pass.slot_mapping + first, layer.kv,
                          static_cast<const T*>(layer.qk_norm), static_cast<const T*>(layer.row_norm), decoder.eps, count,
                          heads.num_heads, heads.num_kv_heads, heads.head_dim);
      });
      tree_attention(member, plan, layer.attention, items, qkv, qkv_size, layer.kv, attended);
      if (i + 1 == decoder.num_layers && pass.num_rows < num_tokens) { // the other rows have written their KV: they are done
        member.share(pass.num_rows, size + q_size, [&](int64_t row) {
          std::memcpy(kept_stream + row * size, stream + pass.rows[row] * size, size * sizeof(T));
          std::memcpy(kept_attended + row * q_size, attended + pass.rows[row] * q_size, q_size * sizeof(T));
        });
        stream_rows = kept_stream, attended_rows = kept_attended, num_rows = pass.num_rows;
      }
      for_parts(num_rows, kPartRows, [&](int64_t first, int64_t count) {
        T* x = stream_rows + first * size;
        add(layer.output, attended_rows + first * q_size, layer.output_norm, x, count);
        linear<T>(member, layer.gate_up, norm(x, layer.gate_up_norm, normed, count), count, nullptr, gate_up, room);
        (decoder.has_gelu ? gate<gelu, T> : gate<silu, T>)(member, gate_up, gated, count, layer.down.num_inputs);
        add(layer.down, gated, layer.down_norm, x, count);
      });
    }
    linear<T>(member, decoder.head, norm(stream_rows, decoder.final_norm, last_normed, num_rows), num_rows, nullptr, logits, room);
  });
  memory.give_back();
}

} // namespace

#define TITAN_DEFINE_DECODER(T, NAME)                                                                                          \
  extern "C" void forward_##NAME(const Decoder* decoder, const AttentionPlan* plan, const DecoderPass* pass, void* logits) {   \
    forward(*decoder, *plan, *pass, static_cast<T*>(logits));                                                                  \
  }
