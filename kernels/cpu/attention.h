// Ragged tree attention over paged KV.

#pragma once

#include <algorithm>
#include <limits>
#include <type_traits>
#include <vector>

#include "amx_attention.h"
#include "attention_plan.h"
#include "numbers.h"
#include "row_attention.h"

namespace {

// Query rows of one request that share a KV head, and their running sums.
struct RowState {
  std::vector<float> queries; // [rows, width], scaled
  std::vector<float> sums;    // [rows, width], weighted sums of values
  std::vector<float> largest; // [rows], largest score
  std::vector<float> totals;  // [rows], sums of weights
};

// Load keys and values as float32 [kTile, width], zero beyond the head's dimension, and prefetch those of the next tile.
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

// Compute the scores of one query with the keys of a tile; those from `count` on are masked.
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

// Add a tile to a row's weighted sum of values (online softmax: Milakov and Gimelshein, 2018).
template <int D>
inline void add_tile(float* scores, const float* values, int64_t count, int64_t width, float* sums, float* largest, float* total) {
  const int64_t row = D ? D : width;
  float tile_largest = *largest;
  int has_nan = 0; // NaN does not show in the largest score
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
  for (int64_t start = 0; start < row; start += 4 * kLanes) { // as many sums as fit into registers
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

// Choose the function that attends the query rows of a request that share a KV head.
template <typename T>
auto choose_attend_head(const AttentionPlan& plan, [[maybe_unused]] int64_t request) {
#ifdef TITAN_HAS_AMX
  if constexpr (std::is_same_v<T, BFloat16>) {
    const int64_t num_queries = plan.query_start_loc[request + 1] - plan.query_start_loc[request];
    const bool is_row = num_queries * plan.num_heads == plan.num_kv_heads;
    if (takes_tiles(plan) && is_row && plan.head_dim == 64) return attend_row<64>;
    if (takes_tiles(plan) && is_row && plan.head_dim == 128) return attend_row<128>;
    if (takes_tiles(plan) && !is_row)
      return plan.head_dim == 64 ? attend_head_by_tiles<64> : plan.head_dim == 128 ? attend_head_by_tiles<128> : attend_head_by_tiles<0>;
  }
#endif
  return plan.head_dim == 64 ? attend_head<T, 64> : plan.head_dim == 128 ? attend_head<T, 128> : attend_head<T, 0>;
}

template <typename T>
void tree_attention(const AttentionPlan& plan, const T* q, int64_t q_stride, const T* kv_layer, int64_t head_stride,
                    const int64_t* ancestor_bits, T* output, float scale, int64_t window) {
  int64_t num_slots = 0;
  for (int64_t i = 0; i < plan.num_requests; ++i) num_slots += plan.seq_lens[plan.requests[i]];
  const int64_t num_items = plan.num_requests * plan.num_kv_heads;
#pragma omp parallel for schedule(dynamic) if (num_slots * plan.num_kv_heads * plan.head_dim > kMaxSerial)
  for (int64_t item = 0; item < num_items; ++item) {
    const int64_t request = plan.requests[item / plan.num_kv_heads];
    const auto attend = choose_attend_head<T>(plan, request);
    attend(plan, request, item % plan.num_kv_heads, q, q_stride, kv_layer, head_stride, ancestor_bits, output, scale, window);
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
