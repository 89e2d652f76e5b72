// Products on the matrix units of Intel processors (AMX), for up to 64 rows at about memory bandwidth.
//
// The units multiply bfloat16: 16 pairs of inputs of 16 outputs are a tile as packed. A float32 row is multiplied as the three
// bfloat16 rows that sum to it (after Henry, Tang and Heinecke, "Leveraging the bfloat16 Artificial Intelligence Datatype For
// Higher-Precision Computations", ARITH 2019), by weights that bfloat16 holds exactly: all products are then exact, and sums are in
// float32. The units treat subnormal numbers as zero, and a row with an infinite number in it becomes NaN.

#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "numbers.h"
#include "team.h"
#include "weight.h"

#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
#define TITAN_HAS_AMX 1
#endif

namespace {

constexpr int kTileRows = 16;                // rows of x in a tile, and outputs
constexpr int kTileInputs = kPairInputs;     // inputs of a tile, in pairs
constexpr int kAmxRows = 64;                 // rows that are multiplied with a piece of the weights in turn
constexpr int kRowsTogether = 2 * kTileRows; // rows whose sums fit into the tiles
constexpr int kAmxOutputs = 2 * kBlock;      // outputs whose sums fit, two blocks
constexpr int64_t kPieceInputs = 192;        // inputs multiplied at a time: their weights stay in the L1 cache for further rows

#ifdef TITAN_HAS_AMX

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// Configure the tiles: 0 to 3 hold sums [rows, 16], two by two; 4 and 5 rows of x; 6 and 7 weights.
inline void configure_tiles(int64_t num_rows) {
  TileConfig config;
  const uint8_t first = static_cast<uint8_t>(std::min<int64_t>(num_rows, kTileRows));
  const uint8_t second = static_cast<uint8_t>(std::max<int64_t>(num_rows - kTileRows, 1));
  const uint8_t rows[8] = {first, first, second, second, first, second, kTileRows, kTileRows};
  for (int tile = 0; tile < 8; ++tile) config.rows[tile] = rows[tile], config.row_bytes[tile] = 64;
  asm volatile("" : : "r"(&config) : "memory"); // GCC before 14 assumes that only its first 8 bytes are read
  _tile_loadconfig(&config);
}

// Add the products of inputs begin .. end - 1 to the sums of two blocks of outputs, [num_rows, kAmxOutputs]; input 0 starts them at
// 0. With every tile of inputs, prefetch `lines_per_tile` of the lines of either block that are needed next.
template <bool IsWide>
void multiply_tiles(const BFloat16* weights, const BFloat16* x, int64_t depth, int64_t begin, int64_t end, float* sums,
                    const Line* next, int64_t lines_per_tile) {
  constexpr int64_t kSumStride = kAmxOutputs * sizeof(float);
  const int64_t x_stride = depth * sizeof(BFloat16), next_block = num_lines<BFloat16>(depth * kBlock);
  float* second_sums = sums + kTileRows * kAmxOutputs;
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
    const BFloat16* tiles = weights + input * kBlock;
    for (int64_t line = 0; line < lines_per_tile; ++line, ++next) {
      __builtin_prefetch(next, 0, kToL2);
      __builtin_prefetch(next + next_block, 0, kToL2);
    }
    _tile_loadd(4, x + input, x_stride);
    _tile_loadd(6, tiles, sizeof(Line));
    _tile_loadd(7, tiles + depth * kBlock, sizeof(Line));
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

// Number of bfloat16 terms that sum to a number of x; each holds 8 of a float32's 24 significant bits.
template <typename T>
constexpr int kTerms = 1;

template <>
constexpr int kTerms<float> = 3;

// Write a row of x as rows of terms [kTerms, depth], padded with zeros.
inline void write_terms(const BFloat16* x, int64_t num_inputs, int64_t depth, BFloat16* terms) {
  std::copy_n(x, num_inputs, terms);
  std::fill(terms + num_inputs, terms + depth, BFloat16{});
}

inline void write_terms(const float* x, int64_t num_inputs, int64_t depth, BFloat16* terms) {
  for (int64_t i = 0; i < depth; i += kLanes) {
    Lanes rest = {};
    std::memcpy(&rest, x + i, std::max<int64_t>(std::min<int64_t>(kLanes, num_inputs - i), 0) * sizeof *x);
    for (int64_t term = 0; term < kTerms<float>; ++term) {
      // truncated, not rounded: no number becomes infinite
      store(__builtin_convertvector(reinterpret<Words>(rest) >> 16, Halves), terms + term * depth + i);
      rest -= load_lanes(terms + term * depth + i);
    }
  }
}

// Add up the sums of a row's terms, the smallest first.
template <typename T>
inline Lanes add_terms(const float* sums) {
  Lanes total = load_lanes(sums + (kTerms<T> - 1) * kAmxOutputs);
  for (int term = kTerms<T> - 2; term >= 0; --term) total += load_lanes(sums + term * kAmxOutputs);
  return total;
}

// Like `linear` of linear.h, for pairs.
template <typename T>
void multiply_by_tiles(Member& member, const Weight& weight, const T* x, int64_t num_rows, const T* residual, T* output, Line* room) {
  constexpr int kMostTogether = kRowsTogether / kTerms<T>, kMostGroups = (kAmxRows + kMostTogether - 1) / kMostTogether;
  const int64_t depth = depth_of(weight), row_size = kTerms<T> * depth;
  BFloat16* terms = reinterpret_cast<BFloat16*>(room);
  const bool has_terms = std::is_same_v<T, BFloat16> && weight.num_inputs == depth;
  const BFloat16* rows = has_terms ? reinterpret_cast<const BFloat16*>(x) : terms;
  if (!has_terms)
    member.share(num_rows, row_size,
                 [&](int64_t row) { write_terms(x + row * weight.num_inputs, weight.num_inputs, depth, terms + row * row_size); });
  const T* bias = static_cast<const T*>(weight.bias);
  // groups of equal size, so that the tiles are configured once: the last may overlap the one before it
  const int64_t num_groups = (num_rows + kMostTogether - 1) / kMostTogether, together = (num_rows + num_groups - 1) / num_groups;
  // the next piece of the weights is fetched while all groups multiply this one: memory latency and arithmetic overlap
  const int64_t set_size = std::min<int64_t>(num_groups, kMostGroups);
  const int64_t lines_per_tile = (num_lines<BFloat16>(kTileInputs * kBlock) + set_size - 1) / set_size;
  const auto multiply = together * kTerms<T> > kTileRows ? multiply_tiles<true> : multiply_tiles<false>;
  configure_tiles(together * kTerms<T>);
  member.share((weight.num_outputs + kAmxOutputs - 1) / kAmxOutputs, num_rows * depth * kAmxOutputs, [&](int64_t index) {
    alignas(64) float sums[kMostGroups][kRowsTogether * kAmxOutputs];
    const BFloat16* weights = static_cast<const BFloat16*>(weight.data) + index * kAmxOutputs * depth;
    const int64_t first = index * kAmxOutputs, count = std::min<int64_t>(kAmxOutputs, weight.num_outputs - first);
    for (int64_t set = 0; set < num_groups; set += set_size) {
      const int64_t set_end = std::min(set + set_size, num_groups);
      for (int64_t begin = 0; begin < depth; begin += kPieceInputs) {
        const int64_t end = std::min(begin + kPieceInputs, depth);
        const BFloat16* next_piece = weights + (end < depth ? end * kBlock : set_end < num_groups ? 0 : kAmxOutputs * depth);
        for (int64_t group = set; group < set_end; ++group) {
          const int64_t start = std::min(group * together, num_rows - together), tiles = (end - begin) / kTileInputs;
          const Line* next = reinterpret_cast<const Line*>(next_piece) + (group - set) * tiles * lines_per_tile;
          float* group_sums = sums[group - set];
          multiply(weights, rows + start * row_size, depth, begin, end, group_sums, next, lines_per_tile);
          if (end < depth) continue;
          for (int64_t row = group * together; row < start + together; ++row) {
            const int64_t place = row * weight.num_outputs + first;
            const float* row_sums = group_sums + (row - start) * kTerms<T> * kAmxOutputs;
            for (int64_t i = 0; i < count; i += kLanes)
              write_sums(add_terms<T>(row_sums + i), count - i, bias ? bias + first + i : nullptr,
                         residual ? residual + place + i : nullptr, output + place + i);
          }
        }
      }
    }
  });
  _tile_release();
}

#endif

} // namespace
