// Numbers and vectors of them. All arithmetic of the kernels is float32; T is the type of the tensors.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace {

constexpr int kLanes = 16; // numbers in a vector
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
constexpr int64_t kMaxSerial = 16384; // elements that one thread does faster than several

typedef float Lanes __attribute__((vector_size(kLanes * sizeof(float))));
typedef float LooseLanes __attribute__((vector_size(kLanes * sizeof(float)), aligned(sizeof(float))));

#ifdef __clang__
#define TITAN_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
typedef int32_t LaneIndex __attribute__((vector_size(kLanes * sizeof(int32_t))));
#define TITAN_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, LaneIndex{__VA_ARGS__})
#endif

struct BFloat16 {
  uint16_t bits;
};

inline float widen(float x) { return x; }

inline float widen(BFloat16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

inline Lanes load_lanes(const float* values) { return *reinterpret_cast<const LooseLanes*>(values); }

inline Lanes load_lanes(const BFloat16* values) {
  typedef uint16_t Halves __attribute__((vector_size(kLanes * sizeof(uint16_t))));
  typedef uint32_t Words __attribute__((vector_size(kLanes * sizeof(uint32_t))));
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

// exp(x) for x <= 0, within 2 ulp: 2^n times a polynomial in the rest (Cephes, expf). Below -87, where 2^n ends, it is 0.
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
