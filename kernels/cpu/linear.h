// Products of rows with a weight, plain, in tiles, or packed by oneDNN, read in place.
//
// For small weights, the setup of oneDNN's own product takes longer than the product; large ones it reads more slowly.

#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "amx.h"
#include "numbers.h"
#include "weight.h"

namespace {

constexpr int kVectorRows = 8;      // rows whose sums fit into the registers
constexpr int kWideVectorRows = 32; // rows that are multiplied in groups of kVectorRows
constexpr int kVectorsTogether = 4; // vectors of outputs that are computed for all groups of rows in turn

template <typename T>
struct Packing;

template <>
struct Packing<float> {
  static constexpr int kPair = 1;
  static constexpr int64_t kPrefetchBytes = 8192; // read ahead, the fastest distance: hardware prefetch does not reach far enough
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

// Load two neighbouring inputs' weights of 16 outputs that lie side by side; `step` leads from one input to the next.
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

// Compute V vectors of outputs for M rows; x is [depth, M]. Each row is summed in the same order, however many there are.
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

// The same for plain rows of weights and one output; x is [M, depth].
template <typename T, int M>
void multiply_plain_row(const Weight& weight, const float* x, int64_t index, const T* residual, T* output) {
  const int64_t depth = weight.depth, whole = depth / kLanes * kLanes;
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

// Compute vectors of outputs `first` to `end` - 1 for M rows.
template <typename T, int M>
void multiply_vectors(const Weight& weight, const float* x, int64_t first, int64_t end, const T* residual, T* output) {
  constexpr int V = M <= 5 ? 4 : 2; // all sums stay in registers if there are 32 of a vector's size
  if (weight.block == 1) {
    for (int64_t index = first * kLanes; index < std::min(end * kLanes, weight.num_outputs); ++index)
      multiply_plain_row<T, M>(weight, x, index, residual, output);
    return;
  }
  for (; first + V <= end; first += V) multiply_columns<T, M, V>(weight, x, first, residual, output);
  for (; first < end; ++first) multiply_columns<T, M, 1>(weight, x, first, residual, output);
}

// Multiply rows in groups of nearly equal size, at most kVectorRows; groups after the first find the weights in the cache.
template <typename T>
void multiply_by_vectors(const Weight& weight, const T* x, int64_t num_rows, const T* residual, T* output) {
  using Multiply = void (*)(const Weight&, const float*, int64_t, int64_t, const T*, T*);
  static constexpr Multiply kMultiply[kVectorRows] = {multiply_vectors<T, 1>, multiply_vectors<T, 2>, multiply_vectors<T, 3>,
                                                      multiply_vectors<T, 4>, multiply_vectors<T, 5>, multiply_vectors<T, 6>,
                                                      multiply_vectors<T, 7>, multiply_vectors<T, 8>};
  static thread_local std::vector<float> buffer;
  buffer.assign(num_rows * weight.depth, 0.0f);
  float* wide = buffer.data(); // per group [depth, rows], or [rows, depth] for plain rows of weights
  const int64_t num_groups = (num_rows + kVectorRows - 1) / kVectorRows, group_rows = (num_rows + num_groups - 1) / num_groups;
  for (int64_t first = 0; first < num_rows; first += group_rows) {
    const int64_t count = std::min(group_rows, num_rows - first);
    const int64_t row_step = weight.block == 1 ? weight.depth : 1, input_step = weight.block == 1 ? 1 : count;
    for (int64_t row = 0; row < count; ++row)
      for (int64_t i = 0; i < weight.num_inputs; ++i)
        wide[first * weight.depth + row * row_step + i * input_step] = widen(x[(first + row) * weight.num_inputs + i]);
  }
  const int64_t num_vectors = (weight.num_outputs + kLanes - 1) / kLanes;
#pragma omp parallel for schedule(static) if (weight.num_outputs * weight.depth > kMaxSerialWeights)
  for (int64_t vector = 0; vector < num_vectors; vector += kVectorsTogether) {
    const int64_t end = std::min(vector + kVectorsTogether, num_vectors);
    for (int64_t first = 0; first < num_rows; first += group_rows) {
      const int64_t count = std::min(group_rows, num_rows - first), place = first * weight.num_outputs;
      kMultiply[count - 1](weight, wide + first * weight.depth, vector, end, residual ? residual + place : nullptr, output + place);
    }
  }
}

// Return the largest number of rows for which `linear` is at least as fast as oneDNN.
template <typename T>
int64_t max_rows([[maybe_unused]] const Weight& weight) {
#ifdef TITAN_HAS_AMX
  if (takes_tiles(weight)) return std::is_same_v<T, BFloat16> ? kLongAmxRows : kAmxRows; // float32 attention does not use the units
#endif
#ifdef __AVX512F__
  if (std::is_same_v<T, float>) return kWideVectorRows; // beyond that oneDNN is as fast; in bfloat16 already at far fewer rows
#endif
  return kVectorRows;
}

// Multiply x [num_rows, num_inputs] by the weight, and add its bias and the residual stream [num_rows, num_outputs] if given.
template <typename T>
void linear(const Weight& weight, const T* x, int64_t num_rows, const T* residual, T* output) {
#ifdef TITAN_HAS_AMX
  if (takes_tiles(weight)) {
    for (int64_t first = 0; first < num_rows; first += kAmxRows) {
      const int64_t place = first * weight.num_outputs;
      multiply_by_tiles(weight, x + first * weight.num_inputs, std::min<int64_t>(num_rows - first, kAmxRows),
                        residual ? residual + place : nullptr, output + place);
    }
    return;
  }
#endif
  // a bfloat16 weight for float32 rows exists only where there are tiles
  if (num_rows > 0) multiply_by_vectors(weight, x, num_rows, residual, output);
}

} // namespace

// Whether this processor has the matrix units and the system permits their use.
extern "C" int64_t has_tiles() {
#ifdef TITAN_HAS_AMX
  return may_use_amx();
#else
  return 0;
#endif
}

#define TITAN_DEFINE_LINEAR(T, NAME)                                                                                           \
  extern "C" void linear_##NAME(const Weight* weight, const void* x, int64_t num_rows, const void* residual, void* output) {   \
    linear(*weight, static_cast<const T*>(x), num_rows, static_cast<const T*>(residual), static_cast<T*>(output));             \
  }                                                                                                                            \
  extern "C" int64_t max_rows_##NAME(const Weight* weight) { return max_rows<T>(*weight); }
