// Products on the matrix units of Intel processors (AMX), for up to 64 rows at about memory bandwidth.
//
// The units multiply bfloat16: 16 pairs of inputs of 16 outputs are a tile as packed. A float32 row is multiplied as the three
// bfloat16 rows that sum to it (after Henry, Tang and Heinecke, "Leveraging the bfloat16 Artificial Intelligence Datatype For
// Higher-Precision Computations", ARITH 2019), by weights that bfloat16 holds exactly: all products are then exact, and sums are in
// float32. The units treat subnormal numbers as zero, and a row with an infinite number in it becomes NaN.

#pragma once

#include "codes.h"

#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
#define TITAN_HAS_AMX 1
#endif

namespace {

constexpr int kTileRows = 16;                // rows of x in a tile, and outputs
constexpr int kTileInputs = kPairInputs;     // inputs of a tile, in pairs
constexpr int kMostGroups = 16;              // groups of rows that are multiplied with a piece of the weights in turn
constexpr int kRowsTogether = 2 * kTileRows; // rows whose sums fit into the tiles
constexpr int kAmxOutputs = 2 * kBlock;      // outputs whose sums fit, two blocks
constexpr int64_t kPieceInputs = 96;         // most inputs multiplied at a time: their weights stay in the L1 cache for further rows
constexpr int64_t kCachedBytes = 1 << 20;    // of rows that stay in the L2 cache, of 2 MiB, beside the weights
constexpr int64_t kLongPieceInputs = 320;    // of more than two groups of rows: each piece loads and stores their sums

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

// Two blocks of outputs of a weight of pairs, as they are (16 bits) or in codes, of which the tiles of some inputs are decoded at a time.
template <int Bits>
class Strip {
public:
  static constexpr int64_t kTileLines = num_lines<uint8_t>(kTileInputs * kBlock * Bits / 8); // of a block

  // `window` is how many inputs stay decoded, a multiple of those of a piece unless it is all of them.
  Strip(const Weight& weight, int64_t index, int64_t window)
      : depth_(depth_of(weight)), window_(window), lines_(static_cast<const Line*>(weight.data) + index * num_strip_lines()) {
    if constexpr (kHasCodes) {
      static thread_local WorkingMemory memory;
      decoded_ = memory.room_for<BFloat16>(window * kAmxOutputs);
    }
  }

  int64_t num_block_lines() const { return kHeaderLines + depth_ / kTileInputs * kTileLines; }
  int64_t num_strip_lines() const { return kAmxOutputs / kBlock * num_block_lines(); }

  // Where an input's tile of the first block lies in memory; that of the second is a block behind.
  const Line* lines(int64_t input) const { return lines_ + kHeaderLines + input / kTileInputs * kTileLines; }

  // Where an input's tile of the first block is read; that of the second is `tile_stride` numbers behind.
  const BFloat16* tile(int64_t input) const {
    return kHasCodes ? decoded_ + input % window_ * kBlock : reinterpret_cast<const BFloat16*>(lines_) + input * kBlock;
  }
  int64_t tile_stride() const { return (kHasCodes ? window_ : depth_) * kBlock; }

  // Decode an input's tiles; they follow one another.
  void decode(int64_t input) {
    if constexpr (kHasCodes) {
      for (int block = 0; block < kAmxOutputs / kBlock; ++block) {
        const Codes<Bits> codes(lines_, block, depth_);
        BFloat16* result = decoded_ + block * tile_stride() + input % window_ * kBlock;
        decode_units(codes, input, input + kTileInputs, result);
        int64_t& rare = num_rare_[block];
        for (; rare < codes.header().num_rare && codes.rare()[rare].input < input + kTileInputs; ++rare) {
          const RareWeight& each = codes.rare()[rare];
          result[(each.input - input) / 2 * 2 * kBlock + 2 * each.output + each.input % 2] = each.value;
        }
      }
    }
  }

private:
  static constexpr bool kHasCodes = Bits < 16;
  static constexpr int64_t kHeaderLines = kHasCodes ? num_lines<CodeHeader>(1) : 0;
  const int64_t depth_, window_;
  const Line* const lines_;
  BFloat16* decoded_ = nullptr;                 // [2, window / 2, kBlock, 2]
  int64_t num_rare_[kAmxOutputs / kBlock] = {}; // rare weights of the tiles so far
};

// Add the products of inputs begin .. end - 1 to the sums of two blocks of outputs, [num_rows, kAmxOutputs]; input 0 starts them at
// 0. With every tile of inputs, prefetch `lines_per_tile` of the lines of either block that are needed next; the first rows decode the
// tile behind it, too: while the units multiply, other parts of the processor are free.
template <bool IsWide, int Bits>
void multiply_tiles(Strip<Bits>& strip, bool is_first, const BFloat16* x, int64_t depth, int64_t begin, int64_t end, float* sums,
                    const Line* next, int64_t lines_per_tile) {
  constexpr int64_t kSumStride = kAmxOutputs * sizeof(float);
  const int64_t x_stride = depth * sizeof(BFloat16), next_block = strip.num_block_lines(), second_tile = strip.tile_stride();
  float* second_sums = sums + kTileRows * kAmxOutputs;
  if (begin == 0) {
    if (is_first) strip.decode(0);
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
  const BFloat16* tile = strip.tile(begin);
  for (int64_t input = begin; input < end; input += kTileInputs, tile += kTileInputs * kBlock) {
    for (int64_t line = 0; line < lines_per_tile; ++line, ++next) {
      __builtin_prefetch(next);
      __builtin_prefetch(next + next_block);
    }
    if (is_first && input + kTileInputs < depth) strip.decode(input + kTileInputs);
    _tile_loadd(4, x + input, x_stride);
    _tile_loadd(6, tile, sizeof(Line));
    _tile_loadd(7, tile + second_tile, sizeof(Line));
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

// Add up the sums of a row's terms, the smallest first.
template <typename T>
inline Lanes add_terms(const float* sums) {
  Lanes total = load_lanes(sums + (kTerms<BFloat16, T> - 1) * kAmxOutputs);
  for (int term = kTerms<BFloat16, T> - 2; term >= 0; --term) total += load_lanes(sums + term * kAmxOutputs);
  return total;
}

// Write the first `count` outputs of a row of two blocks.
template <typename T>
inline void write_row(const float* sums, int64_t count, const T* bias, const T* residual, T* output) {
  for (int64_t i = 0; i < kAmxOutputs; i += kLanes)
    write_sums(add_terms<T>(sums + i), count - i, bias ? bias + i : nullptr, residual ? residual + i : nullptr, output + i);
}

// Largest number of rows that stay in the L2 cache while they are multiplied with all outputs.
template <typename T>
int64_t most_cached_rows(int64_t depth) {
  return std::max<int64_t>(kCachedBytes / (depth * kTerms<BFloat16, T> * sizeof(BFloat16)), 2 * kRowsTogether);
}

// Like `multiply_by_tiles`, for rows that stay in the cache.
template <int Bits, typename T>
void multiply_cached_rows(Member& member, const Weight& weight, const T* x, int64_t num_rows, const T* residual, T* output, Line* room) {
  constexpr int kMostTogether = kRowsTogether / kTerms<BFloat16, T>;
  const int64_t depth = depth_of(weight), row_size = kTerms<BFloat16, T> * depth;
  const BFloat16* rows = prepare_rows<BFloat16>(member, weight, x, num_rows, room);
  const T* bias = static_cast<const T*>(weight.bias);
  // groups of equal size, so that the tiles are configured once: the last may overlap the one before it
  const int64_t num_groups = (num_rows + kMostTogether - 1) / kMostTogether, together = (num_rows + num_groups - 1) / num_groups;
  // the next piece of the weights is fetched while all groups multiply this one: memory latency and arithmetic overlap
  const int64_t set_size = std::min<int64_t>(num_groups, kMostGroups);
  const int64_t lines_per_tile = (Strip<Bits>::kTileLines + set_size - 1) / set_size;
  const int64_t most_inputs = set_size > 2 ? kLongPieceInputs : kPieceInputs, num_pieces = (depth + most_inputs - 1) / most_inputs;
  const int64_t piece = round_up((depth + num_pieces - 1) / num_pieces, kTileInputs);
  // what is decoded stays in the L1 cache, unless it is needed once more
  const int64_t window = set_size < num_groups ? depth : 2 * piece;
  const auto multiply = together * kTerms<BFloat16, T> > kTileRows ? multiply_tiles<true, Bits> : multiply_tiles<false, Bits>;
  configure_tiles(together * kTerms<BFloat16, T>);
  member.share((weight.num_outputs + kAmxOutputs - 1) / kAmxOutputs, num_rows * depth * kAmxOutputs, [&](int64_t index) {
    alignas(64) float sums[kMostGroups][kRowsTogether * kAmxOutputs];
    Strip<Bits> strip(weight, index, window);
    const int64_t first = index * kAmxOutputs, count = std::min<int64_t>(kAmxOutputs, weight.num_outputs - first);
    for (int64_t set = 0; set < num_groups; set += set_size) {
      const int64_t set_end = std::min(set + set_size, num_groups);
      for (int64_t begin = 0; begin < depth; begin += piece) {
        const int64_t end = std::min(begin + piece, depth);
        const Line* next_piece = set == 0 && end < depth ? strip.lines(end) : strip.lines(set == 0 ? 0 : begin) + strip.num_strip_lines();
        for (int64_t group = set; group < set_end; ++group) {
          const int64_t start = std::min(group * together, num_rows - together), tiles = (end - begin) / kTileInputs;
          const Line* next = next_piece + (group - set) * tiles * lines_per_tile;
          float* group_sums = sums[group - set];
          multiply(strip, group == 0, rows + start * row_size, depth, begin, end, group_sums, next, lines_per_tile);
          if (end < depth) continue;
          for (int64_t row = group * together; row < start + together; ++row) {
            const int64_t place = row * weight.num_outputs + first;
            write_row(group_sums + (row - start) * kTerms<BFloat16, T> * kAmxOutputs, count, bias ? bias + first : nullptr,
                      residual ? residual + place : nullptr, output + place);
          }
        }
      }
    }
  });
  _tile_release();
}

// Like `linear` of linear.h, for pairs in so many bits.
template <int Bits, typename T>
void multiply_by_tiles(Member& member, const Weight& weight, const T* x, int64_t num_rows, const T* residual, T* output, Line* room) {
  for_parts(num_rows, most_cached_rows<T>(depth_of(weight)), [&](int64_t first, int64_t count) {
    const int64_t place = first * weight.num_outputs;
    multiply_cached_rows<Bits>(member, weight, x + first * weight.num_inputs, count, residual ? residual + place : nullptr, output + place,
                               room);
  });
}

#endif

} // namespace
