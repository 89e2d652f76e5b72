// Ragged tree attention over paged KV.

#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include "numbers.h"

extern "C" {

// One ragged batch, the same for all layers and heads. R requests, T query tokens.
struct AttentionPlan {
  int64_t num_requests;
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_dim;
  int64_t block_size;
  int64_t table_width;
  const int64_t* requests;        // [R] those attended here, as rows of the arrays below
  const int64_t* query_start_loc; // [all requests + 1]
  const int64_t* seq_lens;        // [all requests]
  const int64_t* tree_starts;     // [all requests]
  const int64_t* block_table;     // [all requests, table_width]
  const int64_t* positions;       // [T]
  const int64_t* visible_lens;    // [T]
};
}

namespace {

constexpr int kTile = 32; // slots looked at together

// Query rows of one request that share a KV head, and what they have gathered so far.
struct RowState {
  std::vector<float> queries; // [rows, width], scaled
  std::vector<float> sums;    // [rows, width], of values by weight
  std::vector<float> largest; // [rows], largest score
  std::vector<float> totals;  // [rows], of weights
};

template <typename T>
struct Head {
  const AttentionPlan& plan;
  const T* keys;   // of this KV head: [num_blocks, block_size, D]
  const T* values; // likewise
  const int64_t* blocks;
};

// Where the slots of a tile are, counted in elements of a head.
struct Tile {
  int64_t begin;
  int64_t count;
  int64_t offsets[kTile];
};

template <typename T>
Tile find_tile(const Head<T>& head, int64_t begin, int64_t end) {
  const int64_t block_size = head.plan.block_size, head_dim = head.plan.head_dim;
  Tile tile;
  tile.begin = begin;
  tile.count = std::max<int64_t>(std::min<int64_t>(kTile, end - begin), 0);
  int64_t block = begin / block_size, rest = begin % block_size;
  for (int64_t j = 0; j < tile.count; ++j) {
    tile.offsets[j] = (head.blocks[block] * block_size + rest) * head_dim;
    if (++rest == block_size) rest = 0, ++block;
  }
  return tile;
}

inline void prefetch_bytes(const void* first, int64_t num_bytes) {
  for (int64_t byte = 0; byte < num_bytes; byte += 64) __builtin_prefetch(static_cast<const char*>(first) + byte, 0, 2);
}

// Keys and values as float32 [kTile, width], zero beyond the head's dimension; asks for those of the next tile on the way.
template <typename T, int D>
void load_tile(const Head<T>& head, const Tile& tile, const Tile& next, int64_t width, float* keys, float* values) {
  const int64_t head_dim = D ? D : head.plan.head_dim, row = D ? D : width;
  for (int64_t j = 0; j < tile.count; ++j) {
    if (j < next.count) {
      prefetch_bytes(head.keys + next.offsets[j], head_dim * sizeof(T));
      prefetch_bytes(head.values + next.offsets[j], head_dim * sizeof(T));
    }
    const T* key = head.keys + tile.offsets[j];
    const T* value = head.values + tile.offsets[j];
#pragma omp simd
    for (int64_t d = 0; d < head_dim; ++d) {
      keys[j * row + d] = widen(key[d]);
      values[j * row + d] = widen(value[d]);
    }
    for (int64_t d = head_dim; d < row; ++d) keys[j * row + d] = values[j * row + d] = 0.0f;
  }
}

// The sum over the lanes of each of 16 vectors: pairs are added, half of one beside half of the other, until one is left.
inline Lanes sum_lanes(Lanes* x) {
  for (int i = 0; i < 8; ++i)
    x[i] = TITAN_SHUFFLE(x[i], x[i + 8], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
           TITAN_SHUFFLE(x[i], x[i + 8], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
  for (int i = 0; i < 4; ++i)
    x[i] = TITAN_SHUFFLE(x[i], x[i + 4], 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) +
           TITAN_SHUFFLE(x[i], x[i + 4], 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
  for (int i = 0; i < 2; ++i)
    x[i] = TITAN_SHUFFLE(x[i], x[i + 2], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
           TITAN_SHUFFLE(x[i], x[i + 2], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
  return TITAN_SHUFFLE(x[0], x[1], 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) +
         TITAN_SHUFFLE(x[0], x[1], 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
}

// Scores of one query with the keys of a tile; those from `count` on hide what is not there.
template <int D>
inline void score_tile(const float* query, const float* keys, int64_t count, int64_t width, float* scores) {
  const int64_t row = D ? D : width;
  for (int64_t start = 0; start < count; start += kLanes) {
    Lanes products[kLanes];
    for (int j = 0; j < kLanes; ++j) {
      const float* key = keys + (start + j) * row;
      Lanes sum = {};
      for (int64_t d = 0; d < row; d += kLanes)
        sum += load_lanes(query + d) * load_lanes(key + d);
      products[j] = sum;
    }
    *reinterpret_cast<LooseLanes*>(scores + start) = sum_lanes(products);
  }
  for (int64_t j = count; j < kTile; ++j) scores[j] = kMinusInfinity;
}

// Keep the highest `window` bits set, which are the nearest ancestors, since parents come before children.
inline int64_t nearest_ancestors(int64_t bits, int64_t window) {
  while (__builtin_popcountll(bits) > window) bits &= bits - 1;
  return bits;
}

// Hide what row `token` does not see among slots begin .. begin + count - 1.
inline void hide(const AttentionPlan& plan, int64_t token, int64_t tree_start, int64_t bits, int64_t window, int64_t begin,
                 int64_t count, float* scores) {
  const int64_t visible_len = plan.visible_lens[token], first = plan.positions[token] - window + 1;
  if (begin + count <= visible_len && begin >= first) return;
  for (int64_t j = 0; j < count; ++j) {
    const int64_t slot = begin + j, node = slot - tree_start;
    const bool is_context = slot < visible_len && slot >= first;
    const bool is_ancestor = node >= 0 && node < 64 && ((static_cast<uint64_t>(bits) >> node) & 1);
    if (!is_context && !is_ancestor) scores[j] = kMinusInfinity;
  }
}

// Add a tile to a row's weighted sum of values (online softmax: Milakov and Gimelshein, 2018).
template <int D>
inline void add_tile(float* scores, const float* values, int64_t count, int64_t width, float* sums, float* largest, float* total) {
  const int64_t row = D ? D : width;
  float tile_largest = *largest;
  int has_nan = 0; // which the largest score does not show
#pragma omp simd reduction(max : tile_largest) reduction(| : has_nan)
  for (int64_t j = 0; j < kTile; ++j) { // whole tiles, so that the order of sums does not depend on where the context ends
    tile_largest = std::max(tile_largest, scores[j]);
    has_nan |= scores[j] != scores[j];
  }
  if (has_nan) {
    *total = std::numeric_limits<float>::quiet_NaN();
    return;
  }
  if (tile_largest == kMinusInfinity) return;
  float tile_total = 0;
#pragma omp simd reduction(+ : tile_total)
  for (int64_t j = 0; j < kTile; ++j) {
    const float weight = exponential(scores[j] - tile_largest);
    scores[j] = weight;
    tile_total += weight;
  }
  const float kept = exponential(*largest - tile_largest);
  *total = *total * kept + tile_total;
  *largest = tile_largest;
  for (int64_t start = 0; start < row; start += 4 * kLanes) { // so many sums fit into registers
    const int num_vectors = D ? 4 : static_cast<int>(std::min<int64_t>(4, (row - start) / kLanes));
    Lanes part[4];
    for (int i = 0; i < num_vectors; ++i) part[i] = *reinterpret_cast<LooseLanes*>(sums + start + i * kLanes) * kept;
    for (int64_t j = 0; j < count; ++j)
      for (int i = 0; i < num_vectors; ++i)
        part[i] += scores[j] * load_lanes(values + j * row + start + i * kLanes);
    for (int i = 0; i < num_vectors; ++i) *reinterpret_cast<LooseLanes*>(sums + start + i * kLanes) = part[i];
  }
}

template <typename T, int D>
void attend_head(const AttentionPlan& plan, int64_t request, int64_t kv_head, const T* q, int64_t q_stride, const T* kv_layer,
                 int64_t head_stride, const int64_t* ancestor_bits, T* output, float scale, int64_t window) {
  static thread_local RowState state;
  static thread_local std::vector<float> room;
  const int64_t head_dim = D ? D : plan.head_dim, group = plan.num_heads / plan.num_kv_heads;
  const int64_t first_token = plan.query_start_loc[request];
  const int64_t num_rows = (plan.query_start_loc[request + 1] - first_token) * group;
  const int64_t width = (head_dim + kLanes - 1) / kLanes * kLanes;
  state.queries.assign(num_rows * width, 0.0f);
  state.sums.assign(num_rows * width, 0.0f);
  state.largest.assign(num_rows, kMinusInfinity);
  state.totals.assign(num_rows, 0.0f);
  room.resize(2 * kTile * width);
  float* keys = room.data();
  float* values = keys + kTile * width;

  int64_t first_slot = std::numeric_limits<int64_t>::max();
  for (int64_t row = 0; row < num_rows; ++row) {
    const int64_t token = first_token + row / group;
    first_slot = std::min(first_slot, plan.positions[token] - window + 1);
    const T* query = q + token * q_stride + (kv_head * group + row % group) * head_dim;
    for (int64_t d = 0; d < head_dim; ++d) state.queries[row * width + d] = widen(query[d]) * scale;
  }

  const Head<T> head{plan, kv_layer + kv_head * head_stride, kv_layer + (plan.num_kv_heads + kv_head) * head_stride,
                     plan.block_table + request * plan.table_width};
  const int64_t end = plan.seq_lens[request];
  Tile next = find_tile(head, std::max<int64_t>(first_slot, 0) / kTile * kTile, end);
  while (next.count > 0) {
    const Tile tile = next;
    const int64_t begin = tile.begin, count = tile.count;
    next = find_tile(head, begin + kTile, end);
    load_tile<T, D>(head, tile, next, width, keys, values);
    for (int64_t row = 0; row < num_rows; ++row) {
      const int64_t token = first_token + row / group;
      float scores[kTile];
      score_tile<D>(&state.queries[row * width], keys, count, width, scores);
      hide(plan, token, plan.tree_starts[request], nearest_ancestors(ancestor_bits[token], window), window, begin, count, scores);
      add_tile<D>(scores, values, count, width, &state.sums[row * width], &state.largest[row], &state.totals[row]);
    }
  }

  for (int64_t row = 0; row < num_rows; ++row) {
    T* result = output + (first_token + row / group) * plan.num_heads * head_dim + (kv_head * group + row % group) * head_dim;
    const float factor = 1.0f / state.totals[row];
    for (int64_t d = 0; d < head_dim; ++d) narrow(state.sums[row * width + d] * factor, &result[d]);
  }
}

template <typename T>
void tree_attention(const AttentionPlan& plan, const T* q, int64_t q_stride, const T* kv_layer, int64_t head_stride,
                    const int64_t* ancestor_bits, T* output, float scale, int64_t window) {
  int64_t num_slots = 0;
  for (int64_t i = 0; i < plan.num_requests; ++i) num_slots += plan.seq_lens[plan.requests[i]];
  const int64_t num_items = plan.num_requests * plan.num_kv_heads;
#pragma omp parallel for schedule(dynamic) if (num_slots * plan.num_kv_heads * plan.head_dim > kMaxSerial)
  for (int64_t item = 0; item < num_items; ++item) {
    const auto attend = plan.head_dim == 64 ? attend_head<T, 64> : plan.head_dim == 128 ? attend_head<T, 128> : attend_head<T, 0>;
    attend(plan, plan.requests[item / plan.num_kv_heads], item % plan.num_kv_heads, q, q_stride, kv_layer, head_stride,
           ancestor_bits, output, scale, window);
  }
}

} // namespace

#define TITAN_DEFINE_ATTENTION(T, NAME)                                                                                        \
  extern "C" void tree_attention_##NAME(const AttentionPlan* plan, const void* q, int64_t q_stride, const void* kv_layer,      \
                                        int64_t head_stride, const int64_t* ancestor_bits, void* output, float scale,          \
                                        int64_t window) {                                                                      \
    tree_attention(*plan, static_cast<const T*>(q), q_stride, static_cast<const T*>(kv_layer), head_stride, ancestor_bits,     \
                   static_cast<T*>(output), scale, window);                                                                    \
  }
