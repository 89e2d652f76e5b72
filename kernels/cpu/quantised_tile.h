// A tile of quantised slots: its scales, and its numbers as attention multiplies them.
//
// Integers up to 127 are exact in bfloat16. Numbers may be read beyond head_dim: the scales of their block follow.

#pragma once

#include <algorithm>
#include <cstring>

#include "attention_plan.h"
#include "numbers.h"

namespace {

// The scales of a tile of quantised slots; 1 behind its end.
struct TileScales {
  float keys[kTile];
  float values[kTile];
};

inline TileScales find_scales(const Head<int8_t>& head, const Tile& tile) {
  TileScales scales;
  for_runs(head, tile.begin, tile.count, [&](int64_t j, int64_t run_end, int64_t block, int64_t place) {
    const int64_t offset = block + head.plan.block_size * head.plan.head_dim + place * sizeof(float);
    std::memcpy(scales.keys + j, head.keys + offset, (run_end - j) * sizeof(float));
    std::memcpy(scales.values + j, head.values + offset, (run_end - j) * sizeof(float));
  });
  std::fill(scales.keys + tile.count, scales.keys + kTile, 1.0f);
  std::fill(scales.values + tile.count, scales.values + kTile, 1.0f);
  return scales;
}

// Multiply numbers of a tile by the scales of its slots.
inline void multiply(float* numbers, const float* scales) {
  for (int64_t j = 0; j < kTile; j += kLanes) store(load_lanes(numbers + j) * load_lanes(scales + j), numbers + j);
}

// Widen numbers of two slots, or two vectors of dimensions, to pairs.
inline Words widen_pairs(const int8_t* first, const int8_t* second) {
  return reinterpret<Words>(load_lanes(first)) >> 16 | reinterpret<Words>(load_lanes(second));
}

// Where a dimension of a key is widened to: those of bfloat16 are pairs of a vector and the next one.
template <typename X>
inline int64_t key_place(int64_t d) {
  constexpr int64_t kStep = 2 * kLanes;
  return std::is_same_v<X, BFloat16> ? d / kStep * kStep + d % kLanes * 2 + d % kStep / kLanes : d;
}

// Widen the keys of a tile to `copies`, [kTile, dim].
inline void widen_keys(const int8_t* numbers, const Tile& tile, int64_t dim, BFloat16* copies, const BFloat16** rows) {
  for (int64_t j = 0; j < kTile; ++j, copies += dim) {
    const int8_t* key = numbers + tile.offsets[j];
    for (int64_t d = 0; d < dim; d += 2 * kLanes) store(widen_pairs(key + d, key + d + kLanes), copies + d);
    rows[j] = copies;
  }
}

inline void widen_keys(const int8_t* numbers, const Tile& tile, int64_t dim, float* copies, const float** rows) {
  for (int64_t j = 0; j < kTile; ++j, copies += dim) {
    for (int64_t d = 0; d < dim; d += kLanes) store(load_lanes(numbers + tile.offsets[j] + d), copies + d);
    rows[j] = copies;
  }
}

// Widen the values of a tile; those of bfloat16 are pairs of slots, [kTile / 2, dim, 2].
inline void widen_values(const int8_t* numbers, const Tile& tile, int64_t dim, BFloat16* pairs, const BFloat16** rows) {
  for (int64_t j = 0; j < kTile; j += 2, pairs += 2 * dim) {
    for (int64_t d = 0; d < dim; d += kLanes)
      store(widen_pairs(numbers + tile.offsets[j] + d, numbers + tile.offsets[j + 1] + d), pairs + 2 * d);
    rows[j] = pairs;
  }
}

inline void widen_values(const int8_t* numbers, const Tile& tile, int64_t dim, float* copies, const float** rows) {
  widen_keys(numbers, tile, dim, copies, rows);
}

} // namespace
