// Pairs of bfloat16 weights in 12 bits each, without loss, where reading the weights is what products take their time for; in 8 bits,
// if their mantissas end after 3 of theirs.
//
// The upper byte of a weight is its sign and most of its exponent: those of a block of weights have few values. Each block has a palette
// of 16, and of each weight its lower byte, or the upper half of that, and the number of its upper one, 4 bits. Number 0 is the byte
// 0; the others are the most frequent ones. A weight whose upper byte is not among them is rare: it is coded as 0.0, and its products
// are added to the sums at the end, or, for matrix units, it is put into its decoded tile. Splitting off the exponents, since they hold
// little, is from Zhang et al., "70% Size, 100% Accuracy: Lossless LLM Compression for Efficient GPU Inference via Dynamic-Length Float
// (DFloat11)", 2025; codes of one length take a few instructions to read.

#pragma once

#include <numeric>
#include <span>

#include "product.h"

#if defined(__AVX512BW__) || defined(__AVX2__)
#define TITAN_HAS_CODES 1
#endif

namespace {

struct RareWeight {
  int32_t input;
  uint16_t output; // of the block
  BFloat16 value;
};

constexpr int kPalette = 16; // values of upper bytes

// Before the codes of each block, so that the first rows of a weight are a weight, too.
struct alignas(64) CodeHeader {
  uint8_t palette[kPalette];
  int64_t rare_offset; // in bytes from here to the block's rare weights, which lie behind all blocks
  int64_t num_rare;
};
constexpr int kHeaderBytes = 64, kRareBytes = 8; // as Python, which reads these here, packs them
static_assert(sizeof(CodeHeader) == kHeaderBytes && sizeof(RareWeight) == kRareBytes);

constexpr int kUnitInputs = 8; // inputs whose weights are coded together
constexpr int kPartBytes = 64; // of a unit's parts: the numbers of upper bytes, 4 bits each; lower bytes of 4 inputs; those of 4 more

// Rows from which on the first group keeps what it decodes for further groups, if that stays in the L2 cache; least rows of such a group.
template <typename X>
constexpr int64_t kKeptRows = kLanes < 16 ? 7 : kPair<X> == 2 ? 128 : 32;
constexpr int kLeastKept = 4;
constexpr int64_t kKeptNumbers = 1 << (kLanes < 16 ? 17 : 18);
static_assert(kKeptRows<BFloat16> > kMostRows && kKeptRows<float> > kMostRows && kLeastKept <= kMostRows);

// The codes of a block, of 12 or 8 bits: [depth / kUnitInputs, kUnitBytes], behind their header.
template <int Bits>
struct Codes {
  static constexpr int kUnitBytes = kUnitInputs * kBlock * Bits / 8;
  static constexpr bool kIsShort = Bits == 8; // the third part is missing: the second has the upper halves of all lower bytes

  static constexpr int64_t num_bytes(int64_t depth) { return sizeof(CodeHeader) + depth / kUnitInputs * kUnitBytes; }

  Codes(const void* blocks, int64_t block, int64_t depth) : start(static_cast<const uint8_t*>(blocks) + block * num_bytes(depth)) {}

  const CodeHeader& header() const { return *reinterpret_cast<const CodeHeader*>(start); }
  const uint8_t* units() const { return start + sizeof(CodeHeader); }

  // Rare weights, those of earlier inputs first but for the order within a unit.
  std::span<const RareWeight> rare() const {
    return {reinterpret_cast<const RareWeight*>(start + header().rare_offset), static_cast<size_t>(header().num_rare)};
  }

  const uint8_t* start;
};

#ifdef TITAN_HAS_CODES

// Decode the weights of half a unit, two pairs of inputs, for the outputs of one vector of the block; rare ones are 0.0. The block's
// palette is in every 16 bytes.
template <typename Coded>
inline void decode_half(const uint8_t* unit, int half, int vector, Words palette, Words& first, Words& second) {
  unit += vector * sizeof(Words);
  const Words numbers = load<Words>(unit) >> 4 * half & 0x0f0f0f0fu;
  Words low = load<Words>(unit + (Coded::kIsShort ? 1 : 1 + half) * kPartBytes);
  if constexpr (Coded::kIsShort) low = low << 4 * (1 - half) & 0xf0f0f0f0u;
#ifdef __AVX512BW__
  const __m512i lower = reinterpret<__m512i>(low);
  const __m512i upper = _mm512_shuffle_epi8(reinterpret<__m512i>(palette), reinterpret<__m512i>(numbers));
  first = reinterpret<Words>(_mm512_unpacklo_epi8(lower, upper));
  second = reinterpret<Words>(_mm512_unpackhi_epi8(lower, upper));
#else
  const __m256i lower = reinterpret<__m256i>(low);
  const __m256i upper = _mm256_shuffle_epi8(reinterpret<__m256i>(palette), reinterpret<__m256i>(numbers));
  first = reinterpret<Words>(_mm256_unpacklo_epi8(lower, upper));
  second = reinterpret<Words>(_mm256_unpackhi_epi8(lower, upper));
#endif
}

template <typename Coded>
inline Words palette_of(const Coded& codes) {
  const __m128i palette = load<__m128i>(codes.header().palette);
#ifdef __AVX512BW__
  return reinterpret<Words>(_mm512_broadcast_i32x4(palette));
#else
  return reinterpret<Words>(_mm256_broadcastsi128_si256(palette));
#endif
}

// Decode the weights of inputs begin .. end - 1 of a block to pairs [(end - begin) / 2, kBlock, 2]; rare ones are 0.0.
template <typename Coded>
inline void decode_units(const Coded& codes, int64_t begin, int64_t end, BFloat16* result) {
  const Words palette = palette_of(codes);
  for (int64_t input = begin; input < end; input += kUnitInputs) {
    const uint8_t* unit = codes.units() + input / kUnitInputs * codes.kUnitBytes;
#pragma GCC unroll 4
    for (int i = 0; i < 2 * kParts; ++i) {
      const int half = i / kParts, vector = i % kParts;
      Words pairs[2];
      decode_half<Coded>(unit, half, vector, palette, pairs[0], pairs[1]);
      // one by one: GCC 12 copies both together over the stack
      store(pairs[0], result + (input - begin + 4 * half) * kBlock + vector * kLanes * 2);
      store(pairs[1], result + (input - begin + 4 * half + 2) * kBlock + vector * kLanes * 2);
    }
  }
}

// Copy the weights of an output to `result`, [num_inputs].
template <typename Coded, typename T>
void unpack_codes(const Weight& weight, int64_t row, T* result) {
  const Coded codes(weight.data, row / kBlock, depth_of(weight));
  for (int64_t input = 0; input < weight.num_inputs; input += kUnitInputs) {
    BFloat16 pairs[kUnitInputs * kBlock];
    decode_units(codes, input, input + kUnitInputs, pairs);
    unpack_pairs(pairs, row % kBlock, std::min<int64_t>(kUnitInputs, weight.num_inputs - input), result + input);
  }
  for (const RareWeight& rare : codes.rare())
    if (rare.output == row % kBlock) narrow(widen(rare.value), &result[rare.input]);
}

// As `multiply_blocks`, by blocks of a weight in codes, the first at `start`; rare weights are 0.0. They may be kept as they are decoded,
// as pairs [B, depth / 2, kBlock, 2].
template <int M, int B, typename Coded, bool IsKept, typename X>
[[gnu::noinline]] void multiply_units(const X* x, const uint8_t* start, int64_t depth, BFloat16* kept, Lanes (&results)[B * kParts][M]) {
  constexpr int kUnitBytes = Coded::kUnitBytes;
  // Vectors that are decoded together, as many as there are registers for, so that a number of x is loaded once for them.
  constexpr int kSets = kLanes == 16 ? 1 : B, kVectors = B * kParts / kSets;
  // Beside the sums of many rows there are registers for decoding alone, or multiplying: what is decoded goes to memory in between.
  constexpr bool kGoesToMemory = kLanes == 16 ? M > 6 && kPair<X> == 1 : IsKept || (M > 3 && !Coded::kIsShort);
  constexpr bool kIsInPlace = kGoesToMemory && IsKept && kVectors == kParts; // to where it is kept
  static_assert(!kIsInPlace || B == 1);
  const int64_t last = depth - kPrefetchBytes / kUnitBytes * kUnitInputs;
  const uint8_t* unit[B];
  Words palette[B];
  for (int block = 0; block < B; ++block) {
    const Coded codes(start, block, depth);
    unit[block] = codes.units();
    palette[block] = palette_of(codes);
  }
  Lanes sums[kSets][kVectors][M] = {};
  for (int64_t input = 0; input < depth; input += kUnitInputs) {
    const int64_t ahead = kPrefetchBytes + (input < last ? 0 : (B - 1) * Coded::num_bytes(depth));
    for (int block = 0; block < B; ++block)
      for (int part = 0; part < kUnitBytes; part += kPartBytes) __builtin_prefetch(unit[block] + ahead + part, 0, kToL2);
#pragma GCC unroll 6
    for (int i = 0; i < 2 * kSets; ++i) {
      const int half = i % 2, set = i / 2;
      Words room[2][kVectors];
      const auto pairs = kIsInPlace ? reinterpret_cast<Words(*)[kVectors]>(kept + (input + 4 * half) * kBlock) : room;
#pragma GCC unroll 3
      for (int v = 0; v < kVectors; ++v) {
        const int vector = set * kVectors + v, block = vector / kParts;
        decode_half<Coded>(unit[block], half, vector % kParts, palette[block], pairs[0][v], pairs[1][v]);
      }
      if constexpr (IsKept && !kIsInPlace) {
        for (int pair = 0; pair < 2; ++pair)
          for (int v = 0; v < kVectors; ++v) store(pairs[pair][v], kept + (v * depth + input + 4 * half + 2 * pair) * kBlock);
      }
      if constexpr (kGoesToMemory) asm volatile("" : : "r"(pairs) : "memory");
#pragma GCC unroll 2
      for (int pair = 0; pair < 2; ++pair) add_products<M, kVectors>(x + input + 4 * half + 2 * pair, depth, pairs[pair], sums[set]);
    }
    for (int block = 0; block < B; ++block) unit[block] += kUnitBytes;
  }
#pragma GCC unroll 6
  for (int v = 0; v < B * kParts; ++v)
#pragma GCC unroll 8
    for (int row = 0; row < M; ++row) results[v][row] = sums[v / kVectors][v % kVectors][row];
}

// Multiply x [M, depth] by B blocks of a weight, which are kept, or were kept by rows before these, unless `kept` is null.
template <int M, int B, typename Coded, typename X>
void multiply_codes(const X* x, const Weight& weight, int64_t block, BFloat16* kept, bool are_kept, Lanes (&sums)[B * kParts][M]) {
  const int64_t depth = depth_of(weight);
  const uint8_t* start = Coded(weight.data, block, depth).start;
  if (kept && are_kept)
    multiply_blocks<M, B, true>(x, static_cast<const BFloat16*>(kept), depth, sums);
  else if (M >= kLeastKept && kept)
    multiply_units<M, B, Coded, (M >= kLeastKept)>(x, start, depth, kept, sums);
  else
    multiply_units<M, B, Coded, false>(x, start, depth, nullptr, sums);
  for (int b = 0; b < B; ++b)
    for (const RareWeight& rare : Coded(weight.data, block + b, depth).rare())
      for (int row = 0; row < M; ++row)
        sums[b * kParts + rare.output / kLanes][row][rare.output % kLanes] += widen(x[row * depth + rare.input]) * widen(rare.value);
}

// Code rows [num_rows, depth] of a weight, a multiple of kBlock of them, from `first_block` on: headers and codes of all blocks go to
// `blocks`, their rare weights behind them, block by block as they come. `num_rare` counts these; those above `most_rare` are lost.
template <typename Coded>
void make_codes(Team* team, const uint16_t* rows, int64_t num_rows, int64_t depth, int64_t first_block, uint8_t* blocks,
                int64_t num_blocks, int64_t most_rare, int64_t* num_rare) {
  share(team, num_rows / kBlock, kBlock * depth, [&](int64_t index) {
    const uint16_t* weights = rows + index * kBlock * depth;
    int64_t frequencies[256] = {};
    for (int64_t i = 0; i < kBlock * depth; ++i) ++frequencies[weights[i] >> 8];
    uint8_t bytes[256], numbers[256]; // the palette, then other bytes; and the number of each
    std::iota(bytes, bytes + 256, uint8_t{});
    std::partial_sort(bytes + 1, bytes + kPalette, bytes + 256, [&](uint8_t a, uint8_t b) {
      return frequencies[a] != frequencies[b] ? frequencies[a] > frequencies[b] : a < b;
    });
    for (int i = 0; i < 256; ++i) numbers[bytes[i]] = static_cast<uint8_t>(std::min(i, kPalette));

    uint8_t* start = blocks + (first_block + index) * Coded::num_bytes(depth);
    CodeHeader header = {};
    std::copy_n(bytes, kPalette, header.palette);
    for (int i = kPalette; i < 256; ++i) header.num_rare += frequencies[bytes[i]];
    const int64_t first_rare = std::atomic_ref(*num_rare).fetch_add(header.num_rare);
    if (first_rare + header.num_rare > most_rare) return;
    header.rare_offset = blocks + num_blocks * Coded::num_bytes(depth) - start + first_rare * sizeof(RareWeight);
    std::memcpy(start, &header, sizeof header);
    RareWeight* rare = reinterpret_cast<RareWeight*>(start + header.rare_offset);
    uint8_t* unit = start + sizeof header;
    for (int64_t first = 0; first < depth; first += kUnitInputs, unit += Coded::kUnitBytes) {
      std::fill_n(unit, Coded::kUnitBytes, uint8_t{});
      for (int64_t output = 0; output < kBlock; ++output)
        for (int64_t input = first; input < first + kUnitInputs; ++input) {
          const uint16_t bits = weights[output * depth + input];
          const bool is_second = input / 4 % 2; // of the two halves of a unit
          const int shift = is_second ? 4 : 0;
          // as vectors are interleaved, 8 bytes of one and 8 of another at a time
          uint8_t* place = unit + output / 4 * 16 + input / 2 % 2 * 8 + output % 4 * 2 + input % 2;
          const uint8_t number = numbers[bits >> 8];
          if (number == kPalette) {
            *rare++ = {static_cast<int32_t>(input), static_cast<uint16_t>(output), {bits}};
            continue; // 0.0
          }
          *place |= number << shift;
          place[Coded::kIsShort ? kPartBytes : (1 + is_second) * kPartBytes] |= Coded::kIsShort ? (bits >> 4 & 15) << shift : bits & 255;
        }
    }
  });
}

#endif

} // namespace
