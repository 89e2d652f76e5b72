// Products in bfloat16 on the matrix units of Intel processors (AMX), for up to 64 rows at about the speed of memory.
//
// oneDNN packs for these units, so that 16 pairs of inputs of 16 outputs are a tile as it lies.

#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "numbers.h"
#include "weight.h"

#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#define TITAN_HAS_AMX 1
#endif

namespace {

constexpr int kTileRows = 16;   // rows of x in a tile, and outputs
constexpr int kTileInputs = 32; // in pairs
constexpr int kAmxRows = 64;
constexpr int kRowsTogether = 2 * kTileRows; // whose sums fit into the tiles
constexpr int kAmxBlock = 32; // outputs side by side, two tiles
constexpr int64_t kPieceInputs = 192; // multiplied at a time: their weights stay in the nearest cache for further rows

#ifdef TITAN_HAS_AMX

// Whether the system lets this process use the units: it must be asked once.
inline bool may_use_amx() {
  constexpr int kRequestPermission = 0x1023, kTileData = 18; // of <asm/prctl.h>, and the state component
  static const bool may = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return may;
}

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// Tiles: 0 to 3 are sums [rows, 16], two beside two; 4 and 5 rows of x; 6 and 7 weights.
inline void configure_tiles(int64_t num_rows) {
  TileConfig config;
  const uint8_t first = static_cast<uint8_t>(std::min<int64_t>(num_rows, kTileRows));
  const uint8_t second = static_cast<uint8_t>(std::max<int64_t>(num_rows - kTileRows, 1));
  const uint8_t rows[8] = {first, first, second, second, first, second, kTileRows, kTileRows};
  for (int tile = 0; tile < 8; ++tile) config.rows[tile] = rows[tile], config.row_bytes[tile] = 64;
  asm volatile("" : : "r"(&config) : "memory"); // GCC before 14 takes only the first 8 bytes of it for read
  _tile_loadconfig(&config);
}

// Add the products of inputs begin .. end - 1 to the sums of a block of outputs, [num_rows, kAmxBlock], which start with input 0.
template <bool IsWide>
void multiply_tiles(const BFloat16* weights, const BFloat16* x, int64_t depth, int64_t begin, int64_t end, float* sums) {
  constexpr int64_t kSumStride = kAmxBlock * sizeof(float);
  const int64_t x_stride = depth * sizeof(BFloat16), weight_stride = 2 * kAmxBlock * sizeof(BFloat16);
  float* second_sums = sums + kTileRows * kAmxBlock;
  if (begin == 0) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_loadd(0, sums, kSumStride);
    _tile_loadd(1, sums + kTileRows, kSumStride);
    if constexpr (IsWide) {
      _tile_loadd(2, second_sums, kSumStride);
      _tile_loadd(3, second_sums + kTileRows, kSumStride);
    }
  }
  for (int64_t input = begin; input < end; input += kTileInputs) {
    const BFloat16* tiles = weights + input * kAmxBlock;
    _tile_loadd(4, x + input, x_stride);
    _tile_loadd(6, tiles, weight_stride);
    _tile_loadd(7, tiles + kAmxBlock, weight_stride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (IsWide) {
      _tile_loadd(5, x + kTileRows * depth + input, x_stride);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, sums, kSumStride);
  _tile_stored(1, sums + kTileRows, kSumStride);
  if constexpr (IsWide) {
    _tile_stored(2, second_sums, kSumStride);
    _tile_stored(3, second_sums + kTileRows, kSumStride);
  }
}

// Write a row of `count` sums of a block; bias and residual stream are added if they are given.
inline void finish_row(const float* sums, int64_t count, const BFloat16* bias, const BFloat16* residual, BFloat16* output) {
  if (count == kAmxBlock) {
    Lanes results[2];
    for (int64_t i = 0; i < 2; ++i) {
      const Lanes added = (bias ? load_lanes(bias + i * kLanes) : Lanes{}) + (residual ? load_lanes(residual + i * kLanes) : Lanes{});
      results[i] = load_lanes(sums + i * kLanes) + added;
    }
    const auto narrowed = _mm512_cvtne2ps_pbh(results[1], results[0]);
    std::memcpy(output, &narrowed, sizeof narrowed);
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    const float added = (bias ? widen(bias[i]) : 0.0f) + (residual ? widen(residual[i]) : 0.0f);
    narrow(sums[i] + added, &output[i]);
  }
}

// As `linear` of linear.h, for a weight whose blocks are kAmxBlock outputs and whose depth is whole tiles.
inline void multiply_by_tiles(const Weight& weight, const BFloat16* x, int64_t num_rows, const BFloat16* residual,
                              BFloat16* output) {
  static thread_local std::vector<Line> buffer;
  const BFloat16* rows = x;
  if (weight.num_inputs < weight.depth) {
    buffer.assign(num_lines<BFloat16>(num_rows * weight.depth), Line{});
    BFloat16* padded = reinterpret_cast<BFloat16*>(buffer.data());
    for (int64_t row = 0; row < num_rows; ++row)
      std::copy_n(x + row * weight.num_inputs, weight.num_inputs, padded + row * weight.depth);
    rows = padded;
  }
  const BFloat16* data = static_cast<const BFloat16*>(weight.data);
  const BFloat16* bias = static_cast<const BFloat16*>(weight.bias);
  const int64_t num_blocks = (weight.num_outputs + kAmxBlock - 1) / kAmxBlock;
  // groups of as many rows, for which the tiles are configured once: the last may begin among those of the one before it
  const int64_t num_groups = (num_rows + kRowsTogether - 1) / kRowsTogether, together = (num_rows + num_groups - 1) / num_groups;
  const auto multiply = together > kTileRows ? multiply_tiles<true> : multiply_tiles<false>;
#pragma omp parallel if (weight.num_outputs * weight.depth > kMaxSerialWeights)
  {
    alignas(64) float sums[kAmxRows / kRowsTogether][kRowsTogether * kAmxBlock];
    configure_tiles(together);
#pragma omp for schedule(static)
    for (int64_t block = 0; block < num_blocks; ++block) {
      const BFloat16* weights = data + block * kAmxBlock * weight.depth;
      const int64_t first = block * kAmxBlock, count = std::min<int64_t>(kAmxBlock, weight.num_outputs - first);
      for (int64_t begin = 0; begin < weight.depth; begin += kPieceInputs) {
        const int64_t end = std::min(begin + kPieceInputs, weight.depth);
        for (int64_t group = 0; group < num_groups; ++group) {
          const int64_t start = std::min(group * together, num_rows - together);
          multiply(weights, rows + start * weight.depth, weight.depth, begin, end, sums[group]);
          if (end < weight.depth) continue;
          for (int64_t row = group * together; row < start + together; ++row) {
            const int64_t place = row * weight.num_outputs + first;
            finish_row(sums[group] + (row - start) * kAmxBlock, count, bias ? bias + first : nullptr,
                       residual ? residual + place : nullptr, output + place);
          }
        }
      }
    }
    _tile_release(); // oneDNN configures them its own way
  }
}

inline bool takes_tiles(const Weight& weight) {
  return may_use_amx() && weight.block == kAmxBlock && weight.depth % kTileInputs == 0;
}

#endif

} // namespace
