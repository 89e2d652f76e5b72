// Attention of a single query row in bfloat16: a decode in which each query head has a KV head of its own.
//
// It is memory-bound: keys and values are used in place, and all sums stay in registers.

#pragma once

#include "amx_attention.h"
#include "attention_plan.h"
#include "numbers.h"

namespace {

#ifdef TITAN_HAS_AMX

// The running sums of a row over D dimensions.
template <int D>
struct RowSums {
  static constexpr int kParts = D / kTileInputs;

  Lanes even[kParts] = {}; // dimensions 0, 2, 4 ... of 32 each
  Lanes odd[kParts] = {};
  Lanes totals = {}; // sums of weights
  float largest = kMinusInfinity;

  void rescale(float new_largest) {
    const Lanes kept = power_of_two(Lanes{} + (largest - new_largest));
    for (int part = 0; part < kParts; ++part) even[part] *= kept, odd[part] *= kept;
    totals *= kept;
    largest = new_largest;
  }

  void add(float weight, const BFloat16* value) {
    for (int part = 0; part < kParts; ++part) {
      Words pairs;
      std::memcpy(&pairs, value + part * kTileInputs, sizeof pairs);
      even[part] += weight * reinterpret<Lanes>(pairs << 16);
      odd[part] += weight * reinterpret<Lanes>(pairs & 0xffff0000u);
    }
  }

  void write(BFloat16* result) const {
    const float factor = 1.0f / _mm512_reduce_add_ps(reinterpret<__m512>(totals));
    for (int part = 0; part < kParts; ++part) write_dimensions(even[part], odd[part], factor, result + part * kTileInputs);
  }
};

// Compute the scores of a tile of slots, base 2, and prefetch the next tile's keys.
template <int D>
inline void score_row(const Head<BFloat16>& head, const Tile& tile, const Tile& next, const __m512bh* query, float log_scale,
                      Lanes* scores) {
  for (int first = 0; first < kTile; first += kLanes) {
    Lanes products[kLanes];
    for (int j = 0; j < kLanes; ++j) {
      const int64_t slot = first + j;
      if (slot < next.count) prefetch_bytes(head.keys + next.offsets[slot], D * sizeof(BFloat16));
      const BFloat16* key = head.keys + tile.offsets[std::min<int64_t>(slot, tile.count - 1)];
      __m512 sum = _mm512_setzero_ps();
      for (int part = 0; part < D / kTileInputs; ++part)
        sum = _mm512_dpbf16_ps(sum, reinterpret<__m512bh>(_mm512_loadu_si512(key + part * kTileInputs)), query[part]);
      products[j] = reinterpret<Lanes>(sum);
    }
    scores[first / kLanes] = sum_lanes(products) * log_scale;
  }
}

template <int D>
void attend_row(const AttentionPlan& plan, int64_t request, int64_t kv_head, const BFloat16* q, int64_t q_stride,
                const BFloat16* kv_layer, int64_t head_stride, const int64_t* ancestor_bits, BFloat16* output, float scale,
                int64_t window) {
  const int64_t token = plan.query_start_loc[request], end = plan.seq_lens[request];
  const int64_t bits = nearest_ancestors(ancestor_bits[token], window);
  const Head<BFloat16> head{plan, kv_layer + kv_head * head_stride, kv_layer + (plan.num_kv_heads + kv_head) * head_stride,
                            plan.block_table + request * plan.table_width};
  __m512bh query[D / kTileInputs];
  std::memcpy(query, q + token * q_stride + kv_head * D, sizeof query);
  RowSums<D> sums;
  const int64_t first_slot = std::max<int64_t>(plan.positions[token] - window + 1, 0);
  Tile next = find_tile(head, first_slot / kTile * kTile, end);
  while (next.count > 0) {
    const Tile tile = next;
    next = find_tile(head, tile.begin + kTile, end);
    Lanes scores[kTile / kLanes];
    score_row<D>(head, tile, next, query, scale * kLog2E, scores);
    alignas(64) float weights[kTile];
    std::memcpy(weights, scores, sizeof weights);
    for (int64_t j = tile.count; j < kTile; ++j) weights[j] = kMinusInfinity;
    hide(plan, token, plan.tree_starts[request], bits, window, tile.begin, tile.count, weights);
    const Lanes first = load_lanes(weights), second = load_lanes(weights + kLanes);
    const float largest = _mm512_reduce_max_ps(reinterpret<__m512>(first > second ? first : second));
    if (largest > sums.largest) sums.rescale(largest);
    const Lanes base = Lanes{} + (sums.largest == kMinusInfinity ? 0.0f : sums.largest);
    const Lanes both[2] = {power_of_two(first - base), power_of_two(second - base)};
    sums.totals += both[0] + both[1]; // NaN if a score is
    std::memcpy(weights, both, sizeof weights);
    for (int64_t j = 0; j < tile.count; ++j) {
      if (j < next.count) prefetch_bytes(head.values + next.offsets[j], D * sizeof(BFloat16));
      sums.add(weights[j], head.values + tile.offsets[j]);
    }
  }
  sums.write(output + token * plan.num_heads * D + kv_head * D);
}

#endif

} // namespace
