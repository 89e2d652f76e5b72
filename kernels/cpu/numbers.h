// Numbers and vectors of numbers, and the memory that passes work in. T is the type of the tensors; arithmetic is in float32, but for
// sums of integers where slots are quantised, and for doubles where samples are drawn.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace {

#if defined(__AVX512BW__) // with it, all else that is used of AVX-512
constexpr int kLanes = 16; // numbers in a vector
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
constexpr int kToL1 = 3, kToL2 = 2; // where prefetches go: fewer lines at a time can be on their way to L1
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

typedef float Lanes __attribute__((vector_size(kLanes * sizeof(float))));
typedef uint32_t Words __attribute__((vector_size(kLanes * sizeof(uint32_t))));
typedef int32_t Integers __attribute__((vector_size(kLanes * sizeof(int32_t))));
typedef uint16_t Halves __attribute__((vector_size(kLanes * sizeof(uint16_t))));
typedef int16_t Shorts __attribute__((vector_size(2 * kLanes * sizeof(int16_t))));
typedef int8_t Bytes __attribute__((vector_size(2 * kLanes)));

template <typename To, typename From>
inline To reinterpret(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To result;
  std::memcpy(&result, &value, sizeof result);
  return result;
}

template <typename To>
inline To load(const void* from) {
  To result;
  std::memcpy(&result, from, sizeof result);
  return result;
}

template <typename From>
inline void store(From value, void* to) {
  std::memcpy(to, &value, sizeof value);
}

typedef std::make_index_sequence<kLanes> LaneIndices;

// Take lanes of two vectors; those of the second one are counted from kLanes on.
template <size_t... I, typename Vector>
inline Vector shuffle(Vector x, Vector y) {
#ifdef __clang__
  return __builtin_shufflevector(x, y, I...);
#else
  return __builtin_shuffle(x, y, Words{I...});
#endif
}

// Swap the upper `Half` of every 2 * Half lanes of `a` with the lower `Half` of those of `b`.
template <int Half, typename Vector, size_t... I>
inline void exchange(Vector* a, Vector* b, std::index_sequence<I...>) {
  const Vector x = *a, y = *b;
  *a = shuffle<(I & Half ? kLanes + I - Half : I)...>(x, y);
  *b = shuffle<(I & Half ? kLanes + I : I + Half)...>(x, y);
}

// Transpose kLanes vectors.
template <int Half = kLanes / 2>
inline void transpose(Words* x) {
  for (int i = 0; i < kLanes; ++i)
    if (!(i & Half)) exchange<Half>(x + i, x + i + Half, LaneIndices{});
  if constexpr (Half > 1) transpose<Half / 2>(x);
}

// In every 2 * Half lanes, combine those that are `Half` apart: of `a` in the lower half of the result, of `b` in the upper one.
template <int Half, typename Vector, typename Combine, size_t... I>
inline Vector fold(Vector a, Vector b, const Combine& combine, std::index_sequence<I...>) {
  return combine(shuffle<(I & Half ? kLanes + I : I)...>(a, b), shuffle<(I & Half ? kLanes + I - Half : I + Half)...>(a, b));
}

// Combine all lanes of each of M vectors, at most kLanes, by a function of two vectors: lane i of the result is of vector i.
template <int Half = kLanes / 2, int M, typename Vector, typename Combine>
inline Vector reduce(Vector (&x)[M], const Combine& combine) {
  for (int i = 0; i < std::min(M, Half); ++i) x[i] = fold<Half>(x[i], x[i + Half < M ? i + Half : i], combine, LaneIndices{});
  if constexpr (Half > 1) return reduce<Half / 2>(x, combine);
  return x[0];
}

// Order the lanes of two vectors as pairs of one of each: the lower half of the result, then the upper one.
template <size_t... I>
inline void interleave(Lanes* a, Lanes* b, std::index_sequence<I...>) {
  const Lanes x = *a, y = *b;
  *a = shuffle<(I % 2 * kLanes + I / 2)...>(x, y);
  *b = shuffle<(I % 2 * kLanes + (kLanes + I) / 2)...>(x, y);
}

struct Float16 {
  uint16_t bits;
};

struct BFloat16 {
  uint16_t bits;
};

inline float widen(float x) { return x; }

inline float widen(BFloat16 x) { return reinterpret<float>(static_cast<uint32_t>(x.bits) << 16); }

inline Lanes load_lanes(const float* values) { return load<Lanes>(values); }

inline Lanes load_lanes(const BFloat16* values) {
  return reinterpret<Lanes>(__builtin_convertvector(load<Halves>(values), Words) << 16);
}

inline Lanes load_lanes(const Float16* values) {
#if defined(__AVX512BW__)
  return reinterpret<Lanes>(_mm512_cvtph_ps(load<__m256i>(values)));
#elif defined(__F16C__)
  return reinterpret<Lanes>(_mm256_cvtph_ps(load<__m128i>(values)));
#elif defined(__aarch64__)
  return reinterpret<Lanes>(vcvt_f32_f16(load<float16x4_t>(values)));
#else
  const Words halves = __builtin_convertvector(load<Halves>(values), Words), sign = (halves & 0x8000u) << 16;
  // subnormal numbers, too: the exponent moves to its place, and a product mends its bias
  return reinterpret<Lanes>(reinterpret<Words>(reinterpret<Lanes>((halves & 0x7fffu) << 13) * 0x1p112f) | sign);
#endif
}

// Load 2 * kLanes numbers of 16 bits, a pair in each lane; those of 8 bits are widened, and a vector of pairs stays as it is.
template <typename T>
inline Words load_pairs(const T* values) {
  static_assert(sizeof(T) == 2);
  return load<Words>(values);
}

inline Words load_pairs(Words pairs) { return pairs; }

inline Words load_pairs(const int8_t* values) {
#if defined(__AVX512BW__) // GCC 12 would widen the bytes one by one
  return reinterpret<Words>(_mm512_cvtepi8_epi16(load<__m256i>(values)));
#elif defined(__AVX2__)
  return reinterpret<Words>(_mm256_cvtepi8_epi16(load<__m128i>(values)));
#else
  return reinterpret<Words>(__builtin_convertvector(load<Bytes>(values), Shorts));
#endif
}

inline void narrow(float x, float* result) { *result = x; }

inline void narrow(float x, BFloat16* result) {
  const uint32_t bits = reinterpret<uint32_t>(x), rounded = bits + 0x7fff + (bits >> 16 & 1); // to nearest, ties to even
  result->bits = static_cast<uint16_t>((x == x ? rounded : bits | 0x400000) >> 16);
}

inline void narrow_lanes(Lanes x, float* result) { store(x, result); }

// Subnormal numbers may become zero.
inline void narrow_lanes(Lanes x, BFloat16* result) {
#ifdef __AVX512BF16__
  store(_mm512_cvtneps_pbh(reinterpret<__m512>(x)), result);
#else
  const Words bits = reinterpret<Words>(x), rounded = bits + 0x7fffu + (bits >> 16 & 1u);
  store(__builtin_convertvector((x == x ? rounded : bits | 0x400000u) >> 16, Halves), result);
#endif
}

// Write the first `count` numbers of a vector, after adding those of the bias and of the residual stream, if given.
template <typename T>
inline void write_sums(Lanes sums, int64_t count, const T* bias, const T* residual, T* output) {
  if (count >= kLanes) {
    if (bias) sums += load_lanes(bias);
    if (residual) sums += load_lanes(residual);
    return narrow_lanes(sums, output);
  }
  for (int64_t i = 0; i < count; ++i) narrow(sums[i] + (bias ? widen(bias[i]) : 0.0f) + (residual ? widen(residual[i]) : 0.0f), &output[i]);
}

// exp(x) for x <= 0, within 2 ulp: 2^n times a polynomial in the rest (Cephes, expf). 0 below -87: 2^n would soon be subnormal.
inline float exponential(float argument) {
  const float x = std::max(argument, -87.0f);
  const float n = std::nearbyint(x * 1.44269504088896341f);
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float y = 1.9875691500e-4f;
  y = y * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * r * r + r + 1.0f;
  const uint32_t power = static_cast<uint32_t>(static_cast<int32_t>(std::max(-126.0f, n) + 127.0f)) << 23;
  return argument < -87.0f ? 0.0f : y * reinterpret<float>(power);
}

inline float sigmoid(float x) {
  const float e = exponential(-std::fabs(x));
  return (x >= 0 ? 1.0f : e) / (1.0f + e);
}

// Storage for numbers of any type, aligned so that each whole vector lies in one cache line.
struct __attribute__((may_alias, aligned(kLanes * sizeof(float)))) Line {
  float lanes[kLanes];
};

// Number of lines that hold `count` numbers.
template <typename T>
constexpr int64_t num_lines(int64_t count) {
  return (count * sizeof(T) + sizeof(Line) - 1) / sizeof(Line);
}

// Working memory, with whatever is in it.
class WorkingMemory {
public:
  Line* lines(int64_t count) {
    if (count > size_) {
      lines_.reset(); // first: there may be no room for both
      size_ = 0;
      lines_.reset(new Line[count]);
      size_ = count;
    }
    return lines_.get();
  }

  template <typename T>
  T* room_for(int64_t count) {
    return reinterpret_cast<T*>(lines(num_lines<T>(count)));
  }

  int64_t size() const { return size_; }

private:
  std::unique_ptr<Line[]> lines_;
  int64_t size_ = 0;
};

// Call work(first, count) for rows in parts of nearly equal size.
template <typename Work>
void for_parts(int64_t num_rows, int64_t most_rows, const Work& work) {
  const int64_t num_parts = (num_rows + most_rows - 1) / most_rows;
  for (int64_t part = 0; part < num_parts; ++part) {
    const int64_t first = num_rows * part / num_parts;
    work(first, num_rows * (part + 1) / num_parts - first);
  }
}

} // namespace
