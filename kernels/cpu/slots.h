// The layout of slots in the cache, and what is written to them.
//
// S is the type of the stored numbers. A KV head's part of a block is [block_size, D] numbers; int8 numbers are followed by one float
// scale per slot, which multiplies them. A row of zeros has a scale, too, and a row with a number that is not finite has the scale NaN.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "numbers.h"

// The cache of a layer; strides are in elements. Of a block, the parts of all planes and KV heads best lie side by side.
struct KVLayer {
  void* data;
  int64_t plane_stride; // from keys to values
  int64_t head_stride;
  int64_t block_stride;
  int64_t block_size; // slots
  int64_t is_quantised;
};

namespace {

template <typename S>
constexpr bool kIsQuantised = std::is_same_v<S, int8_t>;

// Call `work` with a number of the type that the cache of a model of type T holds.
template <typename T, typename Work>
inline void with_stored(const KVLayer& kv, const Work& work) {
  kv.is_quantised ? work(int8_t{}) : work(T{});
}

constexpr float kLargestNumber = 127.0f; // of those quantised
constexpr float kLeastSize = 1e-30f;     // of a row's largest number; smaller ones become zeros

// Round numbers to integers up to `most`, below 2^22; return what 1 stands for, NaN if a number is not finite.
template <typename T, typename Integer>
inline float round_to_integers(const T* numbers, int64_t count, float most, Integer* integers) {
  float largest = kLeastSize;
  int are_finite = 1;
#pragma omp simd reduction(max : largest) reduction(& : are_finite)
  for (int64_t i = 0; i < count; ++i) {
    const float x = widen(numbers[i]);
    largest = std::max(largest, std::fabs(x));
    are_finite &= std::isfinite(x);
  }
  const float factor = most / largest;
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    const float rounded = (widen(numbers[i]) * factor + 12582912.0f) - 12582912.0f; // the sum holds no fraction
    integers[i] = static_cast<Integer>(static_cast<int32_t>(rounded));
  }
  return are_finite ? largest / most : std::numeric_limits<float>::quiet_NaN();
}

// Return a KV head's part of the first block.
template <typename S>
inline S* first_block(const KVLayer& kv, int64_t plane, int64_t head) {
  return static_cast<S*>(kv.data) + plane * kv.plane_stride + head * kv.head_stride;
}

// Write a row of `size` numbers, at most head_dim, to its slot of a KV head; the rest of the slot stays.
template <typename S, typename T>
inline void write_slot(const T* row, int64_t size, const KVLayer& kv, int64_t plane, int64_t head, int64_t slot, int64_t head_dim) {
  const int64_t place = slot % kv.block_size;
  S* block = first_block<S>(kv, plane, head) + slot / kv.block_size * kv.block_stride;
  S* numbers = block + place * head_dim;
  if constexpr (kIsQuantised<S>) {
    const float scale = round_to_integers(row, size, kLargestNumber, numbers);
    std::memcpy(block + kv.block_size * head_dim + place * sizeof scale, &scale, sizeof scale);
  } else {
    static_assert(std::is_same_v<S, T>);
    std::memcpy(numbers, row, size * sizeof(T));
  }
}

} // namespace
