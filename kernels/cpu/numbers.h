// Numbers and vectors of numbers. All arithmetic of the kernels is float32; T is the type of the tensors.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace {

constexpr int kLanes = 16; // numbers in a vector
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
constexpr int64_t kMaxSerial = 16384; // most elements that one thread processes faster than several

typedef float Lanes __attribute__((vector_size(kLanes * sizeof(float))));
typedef float LooseLanes __attribute__((vector_size(kLanes * sizeof(float)), aligned(sizeof(float))));

typedef int32_t Integers __attribute__((vector_size(kLanes * sizeof(int32_t))));
typedef uint32_t Words __attribute__((vector_size(kLanes * sizeof(uint32_t))));
typedef uint16_t Halves __attribute__((vector_size(kLanes * sizeof(uint16_t))));

#ifdef __clang__
#define TITAN_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define TITAN_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, Integers{__VA_ARGS__})
#endif

// Swap the upper `Half` of every 2 * Half lanes of `a` with the lower `Half` of those of `b`.
template <int Half>
inline void exchange(Lanes* a, Lanes* b) {
  const Lanes x = *a, y = *b;
  if constexpr (Half == 8) {
    *a = TITAN_SHUFFLE(x, y, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
    *b = TITAN_SHUFFLE(x, y, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
  } else if constexpr (Half == 4) {
    *a = TITAN_SHUFFLE(x, y, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27);
    *b = TITAN_SHUFFLE(x, y, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
  } else if constexpr (Half == 2) {
    *a = TITAN_SHUFFLE(x, y, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
    *b = TITAN_SHUFFLE(x, y, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
  } else {
    *a = TITAN_SHUFFLE(x, y, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30);
    *b = TITAN_SHUFFLE(x, y, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
  }
}

// Call `exchange` on each pair of 16 vectors that are `Half` apart.
template <int Half>
inline void exchange_all(Lanes* x) {
  for (int i = 0; i < kLanes; ++i)
    if (!(i & Half)) exchange<Half>(x + i, x + i + Half);
}

// Transpose 16 vectors of 32-bit words of any kind.
inline void transpose(Lanes* x) {
  exchange_all<8>(x);
  exchange_all<4>(x);
  exchange_all<2>(x);
  exchange_all<1>(x);
}

// Reduce the first 2 * Half vectors to `Half` vectors of partial sums, each of two of them side by side.
template <int Half>
inline void add_halves(Lanes* x) {
  for (int i = 0; i < Half; ++i) {
    exchange<Half>(x + i, x + i + Half);
    x[i] += x[i + Half];
  }
}

// Return the sum over the lanes of each of 16 vectors.
inline Lanes sum_lanes(Lanes* x) {
  add_halves<8>(x);
  add_halves<4>(x);
  add_halves<2>(x);
  add_halves<1>(x);
  return x[0];
}

struct BFloat16 {
  uint16_t bits;
};

// Storage for numbers of any type, aligned so that each whole vector lies in one cache line.
struct __attribute__((may_alias, aligned(kLanes * sizeof(float)))) Line {
  float lanes[kLanes];
};

// Number of lines that hold `count` numbers.
template <typename T>
constexpr int64_t num_lines(int64_t count) {
  return (count * sizeof(T) + sizeof(Line) - 1) / sizeof(Line);
}

inline float widen(float x) { return x; }

inline float widen(BFloat16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

inline Lanes load_lanes(const float* values) { return *reinterpret_cast<const LooseLanes*>(values); }

inline Lanes load_lanes(const BFloat16* values) {
  Halves halves;
  std::memcpy(&halves, values, sizeof halves);
  const Words words = __builtin_convertvector(halves, Words) << 16;
  Lanes lanes;
  std::memcpy(&lanes, &words, sizeof lanes);
  return lanes;
}

inline void narrow(float x, float* result) { *result = x; }

inline void narrow(float x, BFloat16* result) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const uint32_t rounded = bits + 0x7fff + ((bits >> 16) & 1); // to nearest, ties to even
  result->bits = static_cast<uint16_t>((x == x ? rounded : bits | 0x400000) >> 16);
}

// exp(x) for x <= 0, within 2 ulp: 2^n times a polynomial in the rest (Cephes, expf). 0 below -87, where 2^n underflows.
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
  float scale;
  std::memcpy(&scale, &power, sizeof scale);
  return argument < -87.0f ? 0.0f : y * scale;
}

inline float sigmoid(float x) {
  const float e = exponential(-std::fabs(x));
  return (x >= 0 ? 1.0f : e) / (1.0f + e);
}

} // namespace
