// Packed weights, and products of a few rows with packed numbers, all sums in registers: what differs between processors.
//
// Each sum of a row runs over the inputs in their order, however many rows and outputs are computed together.

#pragma once

#include "team.h"

namespace {

// The weight of a linear layer, as Python packs it: see `weights.py`.
enum WeightFormat : int64_t { kFloat32 = 0, kFloat16 = 1, kPairs = 2, kCodes = 3, kShortCodes = 4 };

struct Weight {
  // [blocks, inputs, kBlock], or pairs of bfloat16, [blocks, inputs / 2, kBlock, 2], or codes of these, see `codes.h`; padded with zeros
  const void* data;
  const void* bias; // [num_outputs] of the model's type, or null
  int64_t num_outputs;
  int64_t num_inputs;
  WeightFormat format;
};

constexpr int kBlock = 16;      // outputs side by side
constexpr int kPairInputs = 32; // numbers of inputs that pairs are padded to, and of outputs: those of tiles of the matrix units

inline int64_t round_up(int64_t size, int64_t step) { return (size + step - 1) / step * step; }

// Number of inputs with their padding.
inline int64_t depth_of(const Weight& weight) {
  return weight.format >= kPairs ? round_up(weight.num_inputs, kPairInputs) : weight.num_inputs;
}

constexpr int kParts = kBlock / kLanes; // vectors of a block

// Rows and blocks whose sums fit into the registers: 32 of AVX-512 and of NEON, 16 of AVX2. Few rows would have too few sums at a time,
// each of which waits for the one before it, and read too little memory at a time.
constexpr int kMostRows = kLanes == 16 ? 8 : 6;
constexpr int kMostBlocks = 3;
constexpr int64_t most_blocks(int64_t num_rows) {
  return kLanes == 16 ? kMostBlocks : std::min<int64_t>(kMostBlocks, kMostRows / num_rows);
}

constexpr int64_t kPrefetchBytes = 3072;     // read ahead; the prefetch of the hardware does not reach far enough
constexpr int64_t kNearPrefetchBytes = 1024; // of blocks in the L2 cache, to L1

// Call `work` with a number, or with Most if that is less, as a constant.
template <int Most, typename Work>
inline void with_constant(int64_t number, const Work& work) {
  if constexpr (Most > 1) {
    if (number < Most) return with_constant<Most - 1>(number, work);
  }
  work(std::integral_constant<int, Most>{});
}

// Numbers of packed operands, or of those that are pointed to, that one vector holds per output.
template <typename Packed>
constexpr int kPair = std::is_same_v<Packed, BFloat16> || std::is_same_v<Packed, int16_t> || std::is_same_v<Packed, Words> ? 2 : 1;
template <typename Packed>
constexpr int kPair<const Packed*> = kPair<Packed>;

// What products are summed in, of numbers of type X; sums of integers are exact.
template <typename X>
using Sums = std::conditional_t<std::is_same_v<X, int16_t>, Integers, Lanes>;

// The type that rows must have to be multiplied with packed numbers of models of type T.
#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
template <typename T>
using Row = T;
#else
template <typename T>
using Row = float;
#endif

#ifdef __AVX512BF16__
inline Lanes add_pairs(Lanes sum, Words a, Words b) {
  return reinterpret<Lanes>(_mm512_dpbf16_ps(reinterpret<__m512>(sum), reinterpret<__m512bh>(a), reinterpret<__m512bh>(b)));
}
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
inline Lanes add_pairs(Lanes sum, Words a, Words b) {
  return reinterpret<Lanes>(vbfdotq_f32(reinterpret<float32x4_t>(sum), reinterpret<bfloat16x8_t>(a), reinterpret<bfloat16x8_t>(b)));
}
#endif

inline Integers add_pairs(Integers sum, Words a, Words b) {
#if defined(__AVX512VNNI__)
  return reinterpret<Integers>(_mm512_dpwssd_epi32(reinterpret<__m512i>(sum), reinterpret<__m512i>(a), reinterpret<__m512i>(b)));
#elif defined(__AVX512BW__)
  return sum + reinterpret<Integers>(_mm512_madd_epi16(reinterpret<__m512i>(a), reinterpret<__m512i>(b)));
#elif defined(__AVX2__)
  return sum + reinterpret<Integers>(_mm256_madd_epi16(reinterpret<__m256i>(a), reinterpret<__m256i>(b)));
#else
  const Integers x = reinterpret<Integers>(a), y = reinterpret<Integers>(b);
  return sum + (x << 16 >> 16) * (y << 16 >> 16) + (x >> 16) * (y >> 16);
#endif
}

// Copy the weights of one of a block's outputs from pairs [num_inputs / 2, kBlock, 2].
template <typename T>
inline void unpack_pairs(const BFloat16* pairs, int64_t output, int64_t num_inputs, T* result) {
  for (int64_t i = 0; i < num_inputs; ++i) narrow(widen(pairs[(i / 2 * kBlock + output) * 2 + i % 2]), &result[i]);
}

// How many numbers of type X sum to one of type T: bfloat16 holds 8 of a float32's 24 significant bits.
template <typename X, typename T>
constexpr int kTerms = std::is_same_v<X, BFloat16> && std::is_same_v<T, float> ? 3 : 1;

// Write a row of x as rows of terms [kTerms, depth], padded with zeros.
template <typename X, typename T>
inline void write_terms(const T* x, int64_t num_inputs, int64_t depth, X* terms) {
  if constexpr (kTerms<X, T> == 1) {
    for (int64_t i = 0; i < num_inputs; ++i) narrow(widen(x[i]), &terms[i]);
    std::fill(terms + num_inputs, terms + depth, X{});
  } else {
    for (int64_t i = 0; i < depth; i += kLanes) {
      Lanes rest = {};
      std::memcpy(&rest, x + i, std::max<int64_t>(std::min<int64_t>(kLanes, num_inputs - i), 0) * sizeof *x);
      for (int64_t term = 0; term < kTerms<X, T>; ++term) {
        // truncated, not rounded: no number becomes infinite
        store(__builtin_convertvector(reinterpret<Words>(rest) >> 16, Halves), terms + term * depth + i);
        rest -= load_lanes(terms + term * depth + i);
      }
    }
  }
}

// Number of lines of working memory that `prepare_rows` needs.
template <typename X, typename T>
int64_t prepared_lines(const Weight& weight, int64_t num_rows) {
  const int64_t depth = depth_of(weight);
  return std::is_same_v<X, T> && weight.num_inputs == depth ? 0 : num_lines<X>(num_rows * depth * kTerms<X, T>);
}

// Return rows of x as numbers of type X, [num_rows, kTerms, depth]: in place, if that is what they are.
template <typename X, typename T>
const X* prepare_rows(Member& member, const Weight& weight, const T* x, int64_t num_rows, Line* room) {
  const int64_t size = weight.num_inputs, depth = depth_of(weight), row_size = kTerms<X, T> * depth;
  if (prepared_lines<X, T>(weight, num_rows) == 0) return reinterpret_cast<const X*>(x);
  X* rows = reinterpret_cast<X*>(room);
  member.share(num_rows, row_size, [&](int64_t row) { write_terms(x + row * size, size, depth, rows + row * row_size); });
  return rows;
}

// Load one of the `kPair` numbers of each lane as float32.
template <int Place, typename Source>
inline Lanes load_number(Source packed) {
  if constexpr (kPair<Source> == 1) {
    return load_lanes(packed);
  } else {
    const Words pairs = load_pairs(packed);
    return reinterpret<Lanes>(Place == 0 ? pairs << 16 : pairs & 0xffff0000u);
  }
}

// Add the products of `kPair` inputs of M rows with V vectors, from the one at `Place` on.
template <int M, int V, int Place = 0, typename Source>
inline void add_products(const float* x, int64_t stride, const Source (&packed)[V], Lanes (&sums)[V][M]) {
  Lanes numbers[V];
  for (int v = 0; v < V; ++v) numbers[v] = load_number<Place>(packed[v]);
#pragma GCC unroll 8
  for (int row = 0; row < M; ++row)
    for (int v = 0; v < V; ++v) sums[v][row] += numbers[v] * x[row * stride + Place];
  if constexpr (Place + 1 < kPair<Source>) add_products<M, V, Place + 1>(x, stride, packed, sums);
}

// Add the products of numbers of two rows, lane by lane.
inline Lanes add_product(Lanes sum, const float* a, const float* b) { return sum + load_lanes(a) * load_lanes(b); }

template <typename X, typename Sum>
inline Sum add_product(Sum sum, const X* a, const X* b) {
  return add_pairs(sum, load_pairs(a), load_pairs(b));
}

template <int M, int V, typename X, typename Source, typename Sum>
  requires(kPair<X> == 2)
inline void add_products(const X* x, int64_t stride, const Source (&packed)[V], Sum (&sums)[V][M]) {
  for (int row = 0; row < M; ++row) {
    const Words pair = Words{} + load<uint32_t>(x + row * stride);
    for (int v = 0; v < V; ++v) sums[v][row] = add_pairs(sums[v][row], load_pairs(packed[v]), pair);
  }
}

// Multiply x [M, depth] by B blocks of a weight: sums [M, B * kBlock]. Not inline, and with sums of its own that only
// unrolled loops touch, so that they stay in registers whatever is done with the results. The blocks may be in the L2 cache.
template <int M, int B, bool AreNear = false, typename X, typename Packed>
[[gnu::noinline]] void multiply_blocks(const X* x, const Packed* blocks, int64_t depth, Lanes (&results)[B * kParts][M]) {
  const Packed* packed[B * kParts];
  for (int v = 0; v < B * kParts; ++v) packed[v] = blocks + v / kParts * depth * kBlock + v % kParts * kLanes * kPair<Packed>;
  constexpr int64_t kBytes = AreNear ? kNearPrefetchBytes : kPrefetchBytes;
  const int64_t last = depth - kBytes / (kBlock * sizeof(Packed)); // from here on, the next blocks are read ahead
  Lanes sums[B * kParts][M] = {};
  for (int64_t input = 0; input < depth; input += kPair<Packed>) {
    const int64_t ahead = kBytes / sizeof(Packed) + (AreNear || input < last ? 0 : (B - 1) * depth * kBlock);
    for (int block = 0; block < B; ++block) __builtin_prefetch(packed[block * kParts] + ahead, 0, AreNear ? kToL1 : kToL2);
    add_products<M, B * kParts>(x + input, depth, packed, sums);
    for (int v = 0; v < B * kParts; ++v) packed[v] += kBlock * kPair<Packed>;
  }
#pragma GCC unroll 16
  for (int v = 0; v < B * kParts; ++v)
#pragma GCC unroll 8
    for (int row = 0; row < M; ++row) results[v][row] = sums[v][row];
}

} // namespace
