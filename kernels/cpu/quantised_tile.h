// A tile of quantised slots: its scales, its keys as attention multiplies them, and what they are multiplied with.
//
// Numbers may be read beyond head_dim: the scales of their block follow.

#pragma once

#include <algorithm>
#include <cmath>
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

// The largest integers of weights, and those of queries of so many dimensions, whose products with slots have sums of 32 bits.
constexpr float kLargestWeight = 32767.0f;
static_assert(kTile * kLargestWeight * kLargestNumber < 2147483648.0f);

inline float largest_query(int64_t dim) { return std::min(32767.0f, std::floor(2147483520.0f / (kLargestNumber * dim))); }

// Widen the keys of a tile to `copies`, [kTile, dim].
inline void widen_keys(const int8_t* numbers, const Tile& tile, int64_t dim, int16_t* copies, const int16_t** rows) {
  for (int64_t j = 0; j < kTile; ++j, copies += dim) {
    for (int64_t d = 0; d < dim; d += 2 * kLanes) store(load_pairs(numbers + tile.offsets[j] + d), copies + d);
    rows[j] = copies;
  }
}

} // namespace
