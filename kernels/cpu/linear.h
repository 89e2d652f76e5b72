// Products of few rows with a weight, plain or as oneDNN packed it, read where it lies.
//
// oneDNN's own product sets up for longer than such a product takes where weights are small, and reads slower where they are large.

#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "amx.h"
#include "numbers.h"
#include "weight.h"

namespace {

constexpr int kVectorRows = 8;

template <typename T>
struct Packing;

template <>
struct Packing<float> {
  static constexpr int kPair = 1;
  static constexpr int64_t kPrefetchBytes = 8192; // ahead of what is read, as was fastest: the cores alone do not look far enough
};

template <>
struct Packing<BFloat16> {
  static constexpr int kPair = 2;
  static constexpr int64_t kPrefetchBytes = 2048;
};

template <typename T>
inline void prefetch(const T* weight) {
  __builtin_prefetch(reinterpret_cast<const char*>(weight) + Packing<T>::kPrefetchBytes);
}

// Two neighbouring inputs' weights of 16 outputs that stand side by side; `step` from one input to the next.
inline void load_weights(const float* weight, int64_t step, Lanes* even, Lanes* odd) {
  *even = *reinterpret_cast<const LooseLanes*>(weight);
  *odd = *reinterpret_cast<const LooseLanes*>(weight + step);
  prefetch(weight);
  prefetch(weight + step);
}

inline void load_weights(const BFloat16* weight, int64_t, Lanes* even, Lanes* odd) {
  Words pairs;
  std::memcpy(&pairs, weight, sizeof pairs);
  const Words low = pairs << 16, high = pairs & 0xffff0000u;
  std::memcpy(even, &low, sizeof low);
  std::memcpy(odd, &high, sizeof high);
  prefetch(weight);
}

// V vectors of outputs for M rows, x being [depth, M]. However many rows there are, each is summed in the same order.
template <typename T, int M, int V>
void multiply_columns(const Weight& weight, const float* x, int64_t first_vector, const T* residual, T* output) {
  constexpr int kPair = Packing<T>::kPair;
  const int64_t vectors = weight.block / kLanes, step = weight.block;
  const T* columns[V];
  for (int v = 0; v < V; ++v) {
    const int64_t vector = first_vector + v;
    columns[v] = static_cast<const T*>(weight.data) + vector / vectors * weight.block * weight.depth + vector % vectors * kLanes * kPair;
  }
  Lanes sums[V][M] = {};
  for (int64_t input = 0; input < weight.depth; input += 2) {
    for (int v = 0; v < V; ++v) {
      Lanes even_weights, odd_weights;
      load_weights(columns[v] + input * step, step, &even_weights, &odd_weights);
      for (int row = 0; row < M; ++row) {
        sums[v][row] += even_weights * x[input * M + row];
        sums[v][row] += odd_weights * x[(input + 1) * M + row];
      }
    }
  }
  const T* bias = static_cast<const T*>(weight.bias);
  for (int v = 0; v < V; ++v) {
    const int64_t first = (first_vector + v) * kLanes, count = std::min<int64_t>(kLanes, weight.num_outputs - first);
    for (int row = 0; row < M; ++row) {
      for (int64_t lane = 0; lane < count; ++lane) {
        const int64_t place = row * weight.num_outputs + first + lane;
        const float added = (bias ? widen(bias[first + lane]) : 0.0f) + (residual ? widen(residual[place]) : 0.0f);
        narrow(sums[v][row][lane] + added, &output[place]);
      }
    }
  }
}

template <typename T, int M>
void multiply_blocks(const Weight& weight, const float* x, const T* residual, T* output) {
  constexpr int V = M <= 5 ? 4 : 2; // so that all sums stay in registers, where there are 32 of a vector's size
  const int64_t num_vectors = (weight.num_outputs + kLanes - 1) / kLanes;
#pragma omp parallel for schedule(static) if (weight.num_outputs * weight.depth > kMaxSerialWeights)
  for (int64_t first = 0; first < num_vectors; first += V) {
    if (first + V <= num_vectors)
      multiply_columns<T, M, V>(weight, x, first, residual, output);
    else
      for (int64_t vector = first; vector < num_vectors; ++vector)
        multiply_columns<T, M, 1>(weight, x, vector, residual, output);
  }
}

// The same for plain rows of weights, x being [M, depth].
template <typename T, int M>
void multiply_plain(const Weight& weight, const float* x, const T* residual, T* output) {
  const int64_t depth = weight.depth, whole = depth / kLanes * kLanes;
#pragma omp parallel for schedule(static) if (weight.num_outputs * depth > kMaxSerialWeights)
  for (int64_t index = 0; index < weight.num_outputs; ++index) {
    const T* column = static_cast<const T*>(weight.data) + index * depth;
    Lanes sums[M] = {};
    for (int64_t input = 0; input < whole; input += kLanes) {
      prefetch(column + input);
      const Lanes weights = load_lanes(column + input);
      for (int row = 0; row < M; ++row) sums[row] += weights * load_lanes(x + row * depth + input);
    }
    const float bias = weight.bias ? widen(static_cast<const T*>(weight.bias)[index]) : 0.0f;
    for (int row = 0; row < M; ++row) {
      float sum = 0;
      for (int lane = 0; lane < kLanes; ++lane) sum += sums[row][lane];
      for (int64_t input = whole; input < depth; ++input) sum += widen(column[input]) * x[row * depth + input];
      const int64_t place = row * weight.num_outputs + index;
      narrow(sum + bias + (residual ? widen(residual[place]) : 0.0f), &output[place]);
    }
  }
}

template <typename T, int M>
void multiply(const Weight& weight, const T* x, const T* residual, T* output) {
  static thread_local std::vector<float> buffer;
  buffer.assign(M * weight.depth, 0.0f);
  float* wide = buffer.data();
  const bool is_plain = weight.block == 1;
  for (int row = 0; row < M; ++row)
    for (int64_t i = 0; i < weight.num_inputs; ++i)
      wide[is_plain ? row * weight.depth + i : i * M + row] = widen(x[row * weight.num_inputs + i]);
  if (is_plain)
    multiply_plain<T, M>(weight, wide, residual, output);
  else
    multiply_blocks<T, M>(weight, wide, residual, output);
}

template <typename T>
void multiply_rows(const Weight& weight, const T* x, int64_t num_rows, const T* residual, T* output) {
  switch (num_rows) {
  case 1: return multiply<T, 1>(weight, x, residual, output);
  case 2: return multiply<T, 2>(weight, x, residual, output);
  case 3: return multiply<T, 3>(weight, x, residual, output);
  case 4: return multiply<T, 4>(weight, x, residual, output);
  case 5: return multiply<T, 5>(weight, x, residual, output);
  case 6: return multiply<T, 6>(weight, x, residual, output);
  case 7: return multiply<T, 7>(weight, x, residual, output);
  case kVectorRows: return multiply<T, kVectorRows>(weight, x, residual, output);
  }
}

// Most rows for which `linear` reads the weight from memory once.
template <typename T>
int64_t max_rows([[maybe_unused]] const Weight& weight) {
#ifdef TITAN_HAS_AMX
  if (std::is_same_v<T, BFloat16> && takes_tiles(weight)) return kAmxRows;
#endif
  return kVectorRows;
}

// x [num_rows, num_inputs] times the weight, plus its bias and the residual stream [num_rows, num_outputs] if they are given.
template <typename T>
void linear(const Weight& weight, const T* x, int64_t num_rows, const T* residual, T* output) {
#ifdef TITAN_HAS_AMX
  if constexpr (std::is_same_v<T, BFloat16>)
    if (takes_tiles(weight) && num_rows > 0 && num_rows <= kAmxRows) return multiply_by_tiles(weight, x, num_rows, residual, output);
#endif
  for (; num_rows > 0; num_rows -= kVectorRows) {
    multiply_rows(weight, x, std::min<int64_t>(num_rows, kVectorRows), residual, output);
    x += kVectorRows * weight.num_inputs;
    if (residual) residual += kVectorRows * weight.num_outputs;
    output += kVectorRows * weight.num_outputs;
  }
}

} // namespace

#define TITAN_DEFINE_LINEAR(T, NAME)                                                                                           \
  extern "C" void linear_##NAME(const Weight* weight, const void* x, int64_t num_rows, void* output) {                         \
    linear<T>(*weight, static_cast<const T*>(x), num_rows, nullptr, static_cast<T*>(output));                                  \
  }                                                                                                                            \
  extern "C" int64_t max_rows_##NAME(const Weight* weight) { return max_rows<T>(*weight); }
