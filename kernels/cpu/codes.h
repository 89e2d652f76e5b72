// Pairs of bfloat16 weights in 12 bits each, without loss, where reading the weights is what products take their time for.
//
// The upper byte of a weight is its sign and most of its exponent: those of a block of weights have few values. Each block has a palette
// of 16, and of each weight its lower byte and the number of its upper one, 4 bits. Number 0 is the byte 0; the others are the most
// frequent ones. A weight whose upper byte is not among them is rare: it is coded as 0.0, and its products are added to the sums at the
// end. Splitting off the exponents, since they hold little, is from Zhang et al., "70% Size, 100% Accuracy: Lossless LLM Compression
// for Efficient GPU Inference via Dynamic-Length Float (DFloat11)", 2025; codes of one length take a few instructions to read.

#pragma once

#include <algorithm>
#include <vector>

#include "numbers.h"
#include "product.h"
#include "team.h"
#include "weight.h"

#if defined(__AVX512BW__) && !defined(__AMX_BF16__) // AVX2 has too few registers for decoding beside sums; tiles are read as they are
#define TITAN_HAS_CODES 1
#endif

extern "C" struct RareWeight {
  int32_t input;
  uint16_t output; // of the block
  BFloat16 value;
};

namespace {

constexpr int kPalette = 16;   // values of upper bytes
constexpr int kUnitInputs = 8; // inputs whose weights are coded together
constexpr int kPartBytes = 64; // of a unit's parts: the numbers of upper bytes, 4 bits each; lower bytes of 4 inputs; those of 4 more
constexpr int kLowParts = 2;
constexpr int kUnitBytes = (1 + kLowParts) * kPartBytes;

// A weight in codes. Its storage holds the arrays in this order.
struct Codes {
  const uint8_t* units;    // [blocks, depth / kUnitInputs, kUnitBytes]
  const uint8_t* palettes; // [blocks, kPalette]
  const int32_t* ends;     // [blocks], of their rare weights
  const RareWeight* rare;  // in the order of the blocks

  const uint8_t* units_of(int64_t block, int64_t depth) const { return units + block * (depth / kUnitInputs) * kUnitBytes; }
};

inline Codes codes_of(const Weight& weight) {
  const int64_t num_blocks = (weight.num_outputs + kBlock - 1) / kBlock;
  const uint8_t* units = static_cast<const uint8_t*>(weight.data);
  const uint8_t* palettes = units + num_blocks * depth_of(weight) / kUnitInputs * kUnitBytes;
  const int32_t* ends = reinterpret_cast<const int32_t*>(palettes + num_blocks * kPalette);
  return {units, palettes, ends, reinterpret_cast<const RareWeight*>(ends + num_blocks)};
}

// Call `work` with each rare weight of a block.
template <typename Work>
inline void for_each_rare(const Codes& codes, int64_t block, const Work& work) {
  for (int32_t i = block == 0 ? 0 : codes.ends[block - 1]; i < codes.ends[block]; ++i) work(codes.rare[i]);
}

// Where in a unit the code of an output's weight is: as vectors are interleaved, 8 bytes of one and 8 of another at a time.
struct CodePlace {
  CodePlace(int64_t input, int64_t output)
      : byte(output / 4 * 16 + input / 2 % 2 * 8 + output % 4 * 2 + input % 2),
        low(kPartBytes + input / 4 % 2 * kPartBytes + byte),
        shift(static_cast<int>(input / 4 % 2 * 4)) {}
  int64_t byte; // that holds the number of the upper byte
  int64_t low;  // the lower byte
  int shift;    // of the number in its byte
};

inline BFloat16 decode(const uint8_t* units, const uint8_t* palette, int64_t input, int64_t output) {
  const uint8_t* unit = units + input / kUnitInputs * kUnitBytes;
  const CodePlace place(input, output);
  return {static_cast<uint16_t>(palette[unit[place.byte] >> place.shift & 15] << 8 | unit[place.low])};
}

// Copy the weights of an output to `result`, [num_inputs].
template <typename T>
void unpack_codes(const Weight& weight, int64_t row, T* result) {
  const Codes codes = codes_of(weight);
  const int64_t block = row / kBlock, output = row % kBlock;
  const uint8_t* units = codes.units_of(block, depth_of(weight));
  for (int64_t i = 0; i < weight.num_inputs; ++i) narrow(widen(decode(units, codes.palettes + block * kPalette, i, output)), &result[i]);
  for_each_rare(codes, block, [&](const RareWeight& rare) {
    if (rare.output == output) narrow(widen(rare.value), &result[rare.input]);
  });
}

#ifdef TITAN_HAS_CODES

// As `multiply_blocks`, by blocks of a weight in codes, the first at `units`.
template <int M, int B, typename X>
[[gnu::noinline]] void multiply_units(const X* x, int64_t stride, const uint8_t* units, const uint8_t* palettes, int64_t depth,
                                      Lanes (&results)[B][M]) {
  const int64_t block_bytes = depth / kUnitInputs * kUnitBytes, last = depth - kPrefetchBytes / kUnitBytes * kUnitInputs;
  const uint8_t* unit[B];
  __m512i palette[B]; // in every 16 bytes
  for (int block = 0; block < B; ++block) {
    unit[block] = units + block * block_bytes;
    palette[block] = _mm512_broadcast_i32x4(load<__m128i>(palettes + block * kPalette));
  }
  Lanes sums[B][1][M] = {};
  for (int64_t input = 0; input < depth; input += kUnitInputs) {
    const int64_t ahead = kPrefetchBytes + (input < last ? 0 : (B - 1) * block_bytes);
    for (int block = 0; block < B; ++block)
      for (int part = 0; part < kUnitBytes; part += kPartBytes) __builtin_prefetch(unit[block] + ahead + part);
#pragma GCC unroll 2
    for (int part = 0; part < kLowParts; ++part)
#pragma GCC unroll 3
      for (int block = 0; block < B; ++block) {
        const Words numbers = load<Words>(unit[block]) >> 4 * part & 0x0f0f0f0fu;
        const __m512i low = load<__m512i>(unit[block] + (1 + part) * kPartBytes);
        const __m512i high = _mm512_shuffle_epi8(palette[block], reinterpret<__m512i>(numbers));
        const Words pairs[2][1] = {{reinterpret<Words>(_mm512_unpacklo_epi8(low, high))}, {reinterpret<Words>(_mm512_unpackhi_epi8(low, high))}};
#pragma GCC unroll 2
        for (int pair = 0; pair < 2; ++pair) {
          add_products<M, 1>(x + input + 4 * part + 2 * pair, stride, pairs[pair], sums[block]);
          asm volatile("" : : : "memory"); // or GCC keeps numbers of x in registers for the next block, and sums out of them
        }
      }
    for (int block = 0; block < B; ++block) unit[block] += kUnitBytes;
  }
#pragma GCC unroll 3
  for (int block = 0; block < B; ++block)
#pragma GCC unroll 8
    for (int row = 0; row < M; ++row) results[block][row] = sums[block][0][row];
}

// Multiply x [M, depth], `stride` apart, by B blocks of a weight.
template <int M, int B, typename X>
void multiply_codes(const Codes& codes, const X* x, int64_t stride, int64_t block, int64_t depth, Lanes (&sums)[B][M]) {
  multiply_units<M, B>(x, stride, codes.units_of(block, depth), codes.palettes + block * kPalette, depth, sums);
  for (int b = 0; b < B; ++b)
    for_each_rare(codes, block + b, [&](const RareWeight& rare) {
      for (int row = 0; row < M; ++row)
        sums[b][row][rare.output] += widen(x[row * stride + rare.input]) * widen(rare.value);
    });
}

#endif

} // namespace

// Whether products with codes are compiled.
extern "C" int64_t reads_codes() {
#ifdef TITAN_HAS_CODES
  return 1;
#else
  return 0;
#endif
}

// Choose the palette of each block of rows [num_rows, depth], a multiple of kBlock rows, and count its rare weights.
extern "C" void choose_palettes(Team* team, const uint16_t* rows, int64_t num_rows, int64_t depth, uint8_t* palettes, int32_t* counts) {
  share(team, num_rows / kBlock, kBlock * depth, [&](int64_t block) {
    const uint16_t* numbers = rows + block * kBlock * depth;
    int64_t frequencies[256] = {};
    for (int64_t i = 0; i < kBlock * depth; ++i) ++frequencies[numbers[i] >> 8];
    uint8_t bytes[256], *palette = palettes + block * kPalette;
    for (int i = 0; i < 256; ++i) bytes[i] = static_cast<uint8_t>(i);
    std::partial_sort(bytes + 1, bytes + kPalette, bytes + 256, [&](uint8_t a, uint8_t b) {
      return frequencies[a] != frequencies[b] ? frequencies[a] > frequencies[b] : a < b;
    });
    std::copy_n(bytes, kPalette, palette);
    counts[block] = 0;
    for (int i = kPalette; i < 256; ++i) counts[block] += static_cast<int32_t>(frequencies[bytes[i]]);
  });
}

// Code rows [num_rows, depth], a multiple of kBlock rows, by the palettes chosen for them. The room for rare weights is that of the whole
// weight, of which these are the rows from `first_block` on.
extern "C" void make_codes(Team* team, const uint16_t* rows, int64_t num_rows, int64_t depth, int64_t first_block,
                           const uint8_t* palettes, const int32_t* ends, uint8_t* units, RareWeight* rare) {
  share(team, num_rows / kBlock, kBlock * depth, [&](int64_t index) {
    const int64_t block = first_block + index;
    RareWeight* next = rare + (block == 0 ? 0 : ends[block - 1]);
    constexpr uint8_t kRare = kPalette;
    uint8_t numbers[256];
    std::fill_n(numbers, 256, kRare);
    for (uint8_t i = 0; i < kPalette; ++i) numbers[palettes[block * kPalette + i]] = i;
    for (int64_t first = 0; first < depth; first += kUnitInputs) {
      uint8_t* unit = units + (block * depth + first) / kUnitInputs * kUnitBytes;
      std::fill_n(unit, kPartBytes, uint8_t{});
      for (int64_t output = 0; output < kBlock; ++output)
        for (int64_t input = first; input < first + kUnitInputs; ++input) {
          const uint16_t bits = rows[(index * kBlock + output) * depth + input];
          const CodePlace place(input, output);
          const uint8_t number = numbers[bits >> 8];
          if (number == kRare) *next++ = {static_cast<int32_t>(input), static_cast<uint16_t>(output), {bits}};
          unit[place.byte] |= number % kPalette << place.shift;
          unit[place.low] = number == kRare ? 0 : static_cast<uint8_t>(bits);
        }
    }
  });
}
