// Products on the matrix units of Intel processors (AMX), for up to 64 rows at about memory bandwidth.
//
// The units multiply bfloat16. oneDNN packs for them: 16 pairs of inputs of 16 outputs are a tile as stored. A float32 row is
// multiplied as the three bfloat16 rows that sum to it (after Henry, Tang and Heinecke, "Leveraging the bfloat16 Artificial
// Intelligence Datatype For Higher-Precision Computations", ARITH 2019), by weights that bfloat16 holds exactly: all products are
// then exact, and sums are in float32. The units treat subnormal numbers as zero, and a row with an infinite number in it becomes
// NaN.

#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>
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
constexpr int kTileInputs = 32; // inputs of a tile, in pairs
constexpr int kAmxRows = 64;      // rows multiplied together
constexpr int kLongAmxRows = 256; // rows of a pass; oneDNN is faster for more
constexpr int kRowsTogether = 2 * kTileRows; // rows whose sums fit into the tiles
constexpr int kAmxBlock = 32; // outputs side by side, two tiles
constexpr int64_t kPieceInputs = 192; // inputs multiplied at a time: their weights stay in the L1 cache for further rows

#ifdef TITAN_HAS_AMX

// Whether the system permits this process to use the units; permission must be requested once.
inline bool may_use_amx() {
  constexpr int kRequestPermission = 0x1023, kTileData = 18; // from <asm/prctl.h>, and the state component
  static const bool may = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return may;
}

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

// Add the products of inputs begin .. end - 1 to the sums of a block of outputs, [num_rows, kAmxBlock]; input 0 starts them at 0.
// With every tile of inputs, prefetch `lines_per_tile` of the lines that are needed next.
template <bool IsWide>
void multiply_tiles(const BFloat16* weights, const BFloat16* x, int64_t depth, int64_t begin, int64_t end, float* sums,
                    const Line* next, int64_t lines_per_tile) {
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
    for (int64_t line = 0; line < lines_per_tile; ++line) __builtin_prefetch(next++, 0, 2);
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
  for (int64_t i = 0; i < num_inputs; i += kLanes) { // whole vectors, as depth is num_inputs
    Lanes rest = load_lanes(x + i);
    for (int64_t term = 0; term < kTerms<float>; ++term) {
      Words bits;
      std::memcpy(&bits, &rest, sizeof bits);
      const auto halves = __builtin_convertvector(bits >> 16, Halves); // truncated, not rounded: no number becomes infinite
      std::memcpy(terms + term * depth + i, &halves, sizeof halves);
      rest -= load_lanes(terms + term * depth + i);
    }
  }
}

// Add up the sums of a row's terms, the smallest first.
template <typename T>
inline Lanes add_terms(const float* sums) {
  Lanes total = load_lanes(sums + (kTerms<T> - 1) * kAmxBlock);
  for (int term = kTerms<T> - 2; term >= 0; --term) total += load_lanes(sums + term * kAmxBlock);
  return total;
}

inline void narrow_lanes(const Lanes* x, BFloat16* result) {
  const auto narrowed = _mm512_cvtne2ps_pbh(x[1], x[0]);
  std::memcpy(result, &narrowed, sizeof narrowed);
}

inline void narrow_lanes(const Lanes* x, float* result) { std::memcpy(result, x, 2 * sizeof *x); }

// Write a row of `count` outputs of a block from the sums of its terms; bias and residual stream are added if given.
template <typename T>
inline void finish_row(const float* sums, int64_t count, const T* bias, const T* residual, T* output) {
  Lanes results[2] = {add_terms<T>(sums), add_terms<T>(sums + kLanes)};
  if (count == kAmxBlock) {
    for (int64_t i = 0; i < 2; ++i)
      results[i] += (bias ? load_lanes(bias + i * kLanes) : Lanes{}) + (residual ? load_lanes(residual + i * kLanes) : Lanes{});
    narrow_lanes(results, output);
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    const float added = (bias ? widen(bias[i]) : 0.0f) + (residual ? widen(residual[i]) : 0.0f);
    narrow(results[i / kLanes][i % kLanes] + added, &output[i]);
  }
}

// Like `linear` of linear.h, for at most kAmxRows rows and a weight with blocks of kAmxBlock outputs and a depth of whole tiles.
template <typename T>
void multiply_by_tiles(const Weight& weight, const T* x, int64_t num_rows, const T* residual, T* output) {
  constexpr int kMostTogether = kRowsTogether / kTerms<T>, kMostGroups = (kAmxRows + kMostTogether - 1) / kMostTogether;
  static thread_local std::vector<Line> buffer;
  const bool has_terms = std::is_same_v<T, BFloat16> && weight.num_inputs == weight.depth;
  if (!has_terms) buffer.resize(num_lines<BFloat16>(num_rows * kTerms<T> * weight.depth));
  BFloat16* terms = reinterpret_cast<BFloat16*>(buffer.data());
  const BFloat16* rows = has_terms ? reinterpret_cast<const BFloat16*>(x) : terms;
  const BFloat16* data = static_cast<const BFloat16*>(weight.data);
  const T* bias = static_cast<const T*>(weight.bias);
  const int64_t num_blocks = (weight.num_outputs + kAmxBlock - 1) / kAmxBlock, row_size = kTerms<T> * weight.depth;
  // groups of equal size, so that the tiles are configured once: the last may overlap the one before it
  const int64_t num_groups = (num_rows + kMostTogether - 1) / kMostTogether, together = (num_rows + num_groups - 1) / num_groups;
  // the next piece of the weights is fetched while all groups multiply this one: memory latency and arithmetic overlap
  const int64_t lines_per_tile = (num_lines<BFloat16>(kTileInputs * kAmxBlock) + num_groups - 1) / num_groups;
  const auto multiply = together * kTerms<T> > kTileRows ? multiply_tiles<true> : multiply_tiles<false>;
#pragma omp parallel if (weight.num_outputs * weight.depth > kMaxSerialWeights)
  {
    alignas(64) float sums[kMostGroups][kRowsTogether * kAmxBlock];
    configure_tiles(together * kTerms<T>);
    if (!has_terms) {
#pragma omp for schedule(static)
      for (int64_t row = 0; row < num_rows; ++row)
        write_terms(x + row * weight.num_inputs, weight.num_inputs, weight.depth, terms + row * row_size);
    }
#pragma omp for schedule(static)
    for (int64_t block = 0; block < num_blocks; ++block) {
      const BFloat16* weights = data + block * kAmxBlock * weight.depth;
      const int64_t first = block * kAmxBlock, count = std::min<int64_t>(kAmxBlock, weight.num_outputs - first);
      for (int64_t begin = 0; begin < weight.depth; begin += kPieceInputs) {
        const int64_t end = std::min(begin + kPieceInputs, weight.depth);
        for (int64_t group = 0; group < num_groups; ++group) {
          const int64_t start = std::min(group * together, num_rows - together), tiles = (end - begin) / kTileInputs;
          const Line* next = reinterpret_cast<const Line*>(weights + end * kAmxBlock) + group * tiles * lines_per_tile;
          multiply(weights, rows + start * row_size, weight.depth, begin, end, sums[group], next, lines_per_tile);
          if (end < weight.depth) continue;
          for (int64_t row = group * together; row < start + together; ++row) {
            const int64_t place = row * weight.num_outputs + first;
            finish_row(sums[group] + (row - start) * kTerms<T> * kAmxBlock, count, bias ? bias + first : nullptr,
                       residual ? residual + place : nullptr, output + place);
          }
        }
      }
    }
    _tile_release(); // oneDNN configures the tiles its own way
  }
}

// Whether a weight suits the units; in float32, only whole blocks and tiles are packed: see weights.py.
inline bool takes_tiles(const Weight& weight) {
  return may_use_amx() && weight.is_bfloat16 && weight.block == kAmxBlock && weight.depth % kTileInputs == 0;
}

#endif

} // namespace
