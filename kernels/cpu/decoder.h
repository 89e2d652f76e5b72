// Passes of a decoder: one call for what `titan/models/decoder.py` does operation by operation; and the operations of a layer other than
// attention and linear layers: RMSNorm, rotation and KV write, gated activation, and the feed-forward part.

#pragma once

#include "attention.h"
#include "linear.h"

namespace {

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
  int64_t vocab_size;     // of the embedding; the head may be of the first tokens alone
  int64_t has_gelu;       // in place of SiLU
  int64_t has_wide_norms; // their weights are of type float
  float eps;
  float embedding_scale;
  const void* embedding;  // [vocab_size, hidden_size], or null if it is the head
  const void* final_norm; // [hidden_size]
  const DecoderLayer* layers;
  Team* team; // of threads
  Weight head;
};

constexpr int64_t kPartRows = 512; // of a pass that go through a part of a layer at a time: what they leave stays in the caches

// Apply an RMSNorm to a row; its weights, from `first` on, are of type float if they are wide.
template <typename T>
void norm_row(const T* x, const void* weights, int64_t first, bool are_wide, T* output, int64_t size, float eps) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < size; ++i) sum += widen(x[i]) * widen(x[i]);
  const float factor = 1.0f / std::sqrt(sum / static_cast<float>(size) + eps);
  const auto norm = [&]<typename W>(const W* weight) {
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) {
      W normed; // rounded before the multiplication by a weight of the same type, as in transformers
      narrow(widen(x[i]) * factor, &normed);
      narrow(widen(normed) * widen(weight[i]), &output[i]);
    }
  };
  are_wide ? norm(static_cast<const float*>(weights) + first) : norm(static_cast<const T*>(weights) + first);
}

template <typename T>
void run_norm(Team* team, const T* x, const void* weights, int64_t are_wide, T* output, int64_t num_rows, int64_t size, float eps) {
  share(team, num_rows, size, [&](int64_t row) { norm_row(x + row * size, weights, 0, are_wide, output + row * size, size, eps); });
}

// Norm and rotate queries and keys, and write keys and values to their slots.
template <typename T>
void rope_and_write_kv(Member& member, const DecoderLayer& layer, bool has_wide_norms, T* qkv, const int64_t* positions,
                       const int64_t* slots, int64_t num_tokens, float eps) {
  const int64_t num_heads = layer.attention.num_heads, num_kv_heads = layer.attention.num_kv_heads, head_dim = layer.attention.head_dim;
  const int64_t num_qk_heads = num_heads + num_kv_heads, token_size = (num_qk_heads + num_kv_heads) * head_dim;
  const int64_t half = head_dim / 2, q_size = num_heads * head_dim, k_size = num_kv_heads * head_dim;
  const T* rope_table = static_cast<const T*>(layer.rope_table);
  const auto norm = [&](T* x, const void* weights, int64_t first, int64_t size) {
    if (weights) norm_row(x, weights, first, has_wide_norms, x, size, eps);
  };
  with_stored<T>(layer.kv, [&]<typename S>(S) {
    member.share(num_tokens, token_size, [&](int64_t token) {
      const T* cos = rope_table + positions[token] * 2 * head_dim;
      const T* sin = cos + head_dim; // its first half is negated
      T *q = qkv + token * token_size, *k = q + q_size;
      norm(q, layer.row_norm, 0, q_size);
      norm(k, layer.row_norm, q_size, k_size);
      for (int64_t i = 0; i < num_qk_heads + num_kv_heads; ++i) {
        T* x = q + i * head_dim;
        if (i < num_qk_heads) {
          norm(x, layer.qk_norm, i * head_dim, head_dim);
#pragma omp simd
          for (int64_t d = 0; d < half; ++d) {
            const float low = widen(x[d]), high = widen(x[d + half]);
            narrow(low * widen(cos[d]) + high * widen(sin[d]), &x[d]);
            narrow(high * widen(cos[d + half]) + low * widen(sin[d + half]), &x[d + half]);
          }
        }
        if (i < num_heads) continue;
        write_slot<S>(x, head_dim, layer.kv, i >= num_qk_heads, (i - num_heads) % num_kv_heads, slots[token], head_dim);
      }
    });
  });
}

template <typename T>
void run_rope(Team* team, const DecoderLayer& layer, int64_t has_wide_norms, T* qkv, const int64_t* positions, const int64_t* slots,
              int64_t num_tokens, float eps) {
  const int64_t size = num_tokens * (layer.attention.num_heads + 2 * layer.attention.num_kv_heads) * layer.attention.head_dim;
  team->run([&](Member& member) { rope_and_write_kv(member, layer, has_wide_norms, qkv, positions, slots, num_tokens, eps); }, size);
}

// Write rows of keys or of values; the numbers of a row lie side by side.
template <typename T>
void write_rows(Team* team, const T* rows, int64_t token_stride, int64_t row_stride, int64_t size, const int64_t* slots, int64_t num_tokens,
                const KVLayer& kv, int64_t plane, int64_t num_kv_heads, int64_t head_dim) {
  with_stored<T>(kv, [&]<typename S>(S) {
    share(team, num_tokens, num_kv_heads * size, [&](int64_t token) {
      for (int64_t head = 0; head < num_kv_heads; ++head)
        write_slot<S>(rows + token * token_stride + head * row_stride, size, kv, plane, head, slots[token], head_dim);
    });
  });
}

inline float silu(float x) { return x * sigmoid(x); }

// Hendrycks and Gimpel, "Gaussian error linear units", 2016: its approximation by tanh, which is 2 * sigmoid(2 * x) - 1.
inline float gelu(float x) { return x * sigmoid(1.5957691216f * (x + 0.044715f * x * x * x)); }

template <float (*activation)(float), typename T>
void gate(Member& member, const T* gate_up, T* output, int64_t num_rows, int64_t size) {
  member.share(num_rows, size, [&](int64_t row) {
    const T* gate = gate_up + row * 2 * size;
    const T* up = gate + size;
    T* result = output + row * size;
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) narrow(activation(widen(gate[i])) * widen(up[i]), &result[i]);
  });
}

template <typename T>
void gated_mlp(Team* team, const Weight& gate_up, const Weight& down, const T* x, int64_t num_rows, T* output) {
  const int64_t most_rows = std::min(num_rows, kPartRows);
  const int64_t num_room = std::max(linear_lines<T>(gate_up, most_rows), linear_lines<T>(down, most_rows));
  const int64_t num_wide = num_lines<T>(most_rows * gate_up.num_outputs);
  const auto memory = team->working_memory();
  Line* room = memory->lines(num_room + num_wide + num_lines<T>(most_rows * down.num_inputs));
  T* wide = reinterpret_cast<T*>(room + num_room);
  T* gated = reinterpret_cast<T*>(room + num_room + num_wide);
  team->run([&](Member& member) {
    for_parts(num_rows, kPartRows, [&](int64_t first, int64_t count) {
      linear<T>(member, gate_up, x + first * gate_up.num_inputs, count, nullptr, wide, room);
      gate<silu>(member, wide, gated, count, down.num_inputs);
      linear<T>(member, down, gated, count, nullptr, output + first * down.num_outputs, room);
    });
  });
}

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

// Run T tokens of a plan, whose keys and values go to slots [T], and compute the logits of some rows, which ascend: [num_kept, vocab_size].
template <typename T>
void forward(const Decoder& decoder, const AttentionPlan& plan, const int64_t* token_ids, const int64_t* slots, const int64_t* kept,
             int64_t num_kept, T* logits) {
  const AttentionSpec& heads = decoder.layers[0].attention;
  const int64_t num_tokens = plan.query_start_loc[plan.num_requests], most_rows = std::min(num_tokens, kPartRows);
  const int64_t size = decoder.hidden_size;
  const int64_t q_size = heads.num_heads * heads.head_dim, k_size = heads.num_kv_heads * heads.head_dim, qkv_size = q_size + 2 * k_size;
  int64_t widest = 0, num_room = linear_lines<T>(decoder.head, num_kept);
  for (int64_t i = 0; i < decoder.num_layers; ++i) {
    const DecoderLayer& layer = decoder.layers[i];
    widest = std::max(widest, layer.gate_up.num_outputs);
    for (const Weight* weight : {&layer.qkv, &layer.output, &layer.gate_up, &layer.down})
      num_room = std::max(num_room, linear_lines<T>(*weight, most_rows));
  }
  const auto memory = decoder.team->working_memory();
  const int64_t per_token = size + qkv_size + q_size, per_row = size + widest + widest / 2;
  Line* room = memory->lines(num_room + num_lines<T>(num_tokens * per_token + most_rows * per_row));
  T* stream = reinterpret_cast<T*>(room + num_room); // the residual stream
  T* qkv = stream + num_tokens * size;
  T* attended = qkv + num_tokens * qkv_size;
  T* normed = attended + num_tokens * q_size; // of some rows, as what follows
  T* gate_up = normed + most_rows * size;
  T* gated = gate_up + most_rows * widest;
  Team& team = *decoder.team;
  const std::vector<AttentionItem> items = attention_items(plan, heads, team.num_threads());

  team.run([&](Member& member) {
    const auto norm_of = [&](const T* x, const void* weights, T* result) {
      norm_row(x, weights, 0, decoder.has_wide_norms, result, size, decoder.eps);
    };
    const auto norm = [&](const T* x, const void* weights, T* results, int64_t count) -> const T* { // what a part of a layer reads
      if (!weights) return x;
      member.share(count, size, [&](int64_t row) { norm_of(x + row * size, weights, results + row * size); });
      return results;
    };
    const auto add = [&](const Weight& weight, const T* rows, const void* norm, T* x, int64_t count) { // to the stream
      if (!norm) return linear(member, weight, rows, count, x, x, room);
      linear<T>(member, weight, rows, count, nullptr, normed, room);
      member.share(count, size, [&](int64_t row) {
        T *added = normed + row * size, *sum = x + row * size;
        norm_of(added, norm, added);
#pragma omp simd
        for (int64_t i = 0; i < size; ++i) narrow(widen(sum[i]) + widen(added[i]), &sum[i]);
      });
    };
    int64_t num_rows = num_tokens;
    member.share(num_tokens, size, [&](int64_t i) { look_up(decoder, token_ids[i], stream + i * size); });
    for (int64_t i = 0; i < decoder.num_layers; ++i) {
      const DecoderLayer& layer = decoder.layers[i];
      for_parts(num_tokens, kPartRows, [&](int64_t first, int64_t count) {
        T* rows = qkv + first * qkv_size;
        linear<T>(member, layer.qkv, norm(stream + first * size, layer.input_norm, normed, count), count, nullptr, rows, room);
        rope_and_write_kv(member, layer, decoder.has_wide_norms, rows, plan.positions + first, slots + first, count, decoder.eps);
      });
      tree_attention(member, plan, layer.attention, items, qkv, qkv_size, layer.kv, attended);
      if (i + 1 == decoder.num_layers && num_kept < num_tokens) { // the other rows have written their KV: they are done
        member.share(1, num_kept * (size + q_size), [&](int64_t) {
          for (int64_t row = 0; row < num_kept; ++row) {
            std::memmove(stream + row * size, stream + kept[row] * size, size * sizeof(T));
            std::memmove(attended + row * q_size, attended + kept[row] * q_size, q_size * sizeof(T));
          }
        });
        num_rows = num_kept;
      }
      for_parts(num_rows, kPartRows, [&](int64_t first, int64_t count) {
        T* x = stream + first * size;
        add(layer.output, attended + first * q_size, layer.output_norm, x, count);
        linear<T>(member, layer.gate_up, norm(x, layer.gate_up_norm, normed, count), count, nullptr, gate_up, room);
        (decoder.has_gelu ? gate<gelu, T> : gate<silu, T>)(member, gate_up, gated, count, layer.down.num_inputs);
        add(layer.down, gated, layer.down_norm, x, count);
      });
    }
    linear<T>(member, decoder.head, norm(stream, decoder.final_norm, stream, num_rows), num_rows, nullptr, logits, room);
  });
}

} // namespace
