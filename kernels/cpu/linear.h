// Products of few rows with a weight that oneDNN has packed, read where it lies.
//
// oneDNN's own product sets up for longer than such a product takes where weights are small, and reads slower where they are large.

#pragma once

#include <algorithm>
#include <vector>

#include "numbers.h"

extern "C" {

// Outputs stand in blocks side by side; of each input, or pair of inputs in bfloat16, those of a block follow each other.
struct PackedWeight {
  const void* data; // [num_outputs / block, depth / pair, block, pair], padded with zeros
  const void* bias; // [num_outputs], or none
  int64_t num_outputs;
  int64_t num_inputs;
  int64_t block; // a multiple of the lanes
  int64_t depth; // num_inputs or more, even
};
}

namespace {

constexpr int kMaxRows = 8;
constexpr int64_t kPrefetchBytes = 2048; // ahead of what is read, since the cores alone do not look far enough

typedef uint32_t Bits __attribute__((vector_size(kLanes * sizeof(uint32_t))));
typedef uint32_t LooseBits __attribute__((vector_size(kLanes * sizeof(uint32_t)), aligned(sizeof(uint16_t))));

template <typename T>
struct Packing;

template <>
struct Packing<float> {
  static constexpr int kPair = 1;
};

template <>
struct Packing<BFloat16> {
  static constexpr int kPair = 2;
};

// Two neighbouring inputs' weights of 16 outputs that stand side by side; `step` from one input to the next.
inline void load_weights(const float* weight, int64_t step, Lanes* even, Lanes* odd) {
  *even = *reinterpret_cast<const LooseLanes*>(weight);
  *odd = *reinterpret_cast<const LooseLanes*>(weight + step);
  __builtin_prefetch(reinterpret_cast<const char*>(weight) + kPrefetchBytes);
  __builtin_prefetch(reinterpret_cast<const char*>(weight + step) + kPrefetchBytes);
}

inline void load_weights(const BFloat16* weight, int64_t, Lanes* even, Lanes* odd) {
  const Bits pairs = *reinterpret_cast<const LooseBits*>(weight);
  const Bits low = pairs << 16, high = pairs & 0xffff0000u;
  std::memcpy(even, &low, sizeof low);
  std::memcpy(odd, &high, sizeof high);
  __builtin_prefetch(reinterpret_cast<const char*>(weight) + kPrefetchBytes);
}

// V vectors of outputs for M rows. However many rows there are, each is summed in the same order.
template <typename T, int M, int V>
void multiply_columns(const PackedWeight& weight, const float* x, int64_t first_vector, const T* residual, T* output) {
  constexpr int kPair = Packing<T>::kPair;
  const int64_t vectors = weight.block / kLanes, step = weight.block;
  const T* columns[V];
  for (int v = 0; v < V; ++v) {
    const int64_t vector = first_vector + v;
    columns[v] = static_cast<const T*>(weight.data) + vector / vectors * weight.block * weight.depth + vector % vectors * kLanes * kPair;
  }
  Lanes even[V][M] = {}, odd[V][M] = {};
  for (int64_t input = 0; input < weight.depth; input += 2) {
    for (int v = 0; v < V; ++v) {
      Lanes even_weights, odd_weights;
      load_weights(columns[v] + input * step, step, &even_weights, &odd_weights);
      for (int row = 0; row < M; ++row) {
        even[v][row] += even_weights * x[row * weight.depth + input];
        odd[v][row] += odd_weights * x[row * weight.depth + input + 1];
      }
    }
  }
  const T* bias = static_cast<const T*>(weight.bias);
  for (int v = 0; v < V; ++v) {
    const int64_t first = (first_vector + v) * kLanes, count = std::min<int64_t>(kLanes, weight.num_outputs - first);
    for (int row = 0; row < M; ++row) {
      const Lanes sums = even[v][row] + odd[v][row];
      for (int64_t lane = 0; lane < count; ++lane) {
        const int64_t place = row * weight.num_outputs + first + lane;
        const float added = (bias ? widen(bias[first + lane]) : 0.0f) + (residual ? widen(residual[place]) : 0.0f);
        narrow(sums[lane] + added, &output[place]);
      }
    }
  }
}

template <typename T, int M>
void multiply(const PackedWeight& weight, const float* x, const T* residual, T* output) {
  constexpr int V = M <= 2 ? 4 : M <= 5 ? 2 : 1; // so that all sums stay in registers
  const int64_t num_vectors = (weight.num_outputs + kLanes - 1) / kLanes;
#pragma omp parallel for schedule(static) if (weight.num_outputs * weight.depth > 2 * kMaxSerial)
  for (int64_t first = 0; first < num_vectors; first += V) {
    if (first + V <= num_vectors)
      multiply_columns<T, M, V>(weight, x, first, residual, output);
    else
      for (int64_t vector = first; vector < num_vectors; ++vector)
        multiply_columns<T, M, 1>(weight, x, vector, residual, output);
  }
}

// x [num_rows, num_inputs] times the weight, plus its bias and the residual stream [num_rows, num_outputs] if they are given.
template <typename T>
void linear(const PackedWeight& weight, const T* x, int64_t num_rows, const T* residual, T* output) {
  static thread_local std::vector<float> buffer;
  buffer.assign(num_rows * weight.depth, 0.0f);
  float* rows = buffer.data();
  for (int64_t row = 0; row < num_rows; ++row) {
#pragma omp simd
    for (int64_t i = 0; i < weight.num_inputs; ++i) rows[row * weight.depth + i] = widen(x[row * weight.num_inputs + i]);
  }
  switch (num_rows) {
  case 1: return multiply<T, 1>(weight, rows, residual, output);
  case 2: return multiply<T, 2>(weight, rows, residual, output);
  case 3: return multiply<T, 3>(weight, rows, residual, output);
  case 4: return multiply<T, 4>(weight, rows, residual, output);
  case 5: return multiply<T, 5>(weight, rows, residual, output);
  case 6: return multiply<T, 6>(weight, rows, residual, output);
  case 7: return multiply<T, 7>(weight, rows, residual, output);
  case kMaxRows: return multiply<T, kMaxRows>(weight, rows, residual, output);
  }
}

} // namespace

#define TITAN_DEFINE_LINEAR(T, NAME)                                                                                           \
  extern "C" void linear_##NAME(const PackedWeight* weight, const void* x, int64_t num_rows, void* output) {                   \
    linear<T>(*weight, static_cast<const T*>(x), num_rows, nullptr, static_cast<T*>(output));                                  \
  }
