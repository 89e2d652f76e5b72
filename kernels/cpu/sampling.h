// Of sampling: the largest logit, softmax at a temperature, and a draw.

#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "numbers.h"

namespace {

constexpr int kChunk = 512; // numbers summed before their sum goes to a double

template <typename T>
void softmax(const T* logits, const float* temperatures, float* probs, int64_t num_rows, int64_t size) {
#pragma omp parallel for if (num_rows * size > kMaxSerial)
  for (int64_t row = 0; row < num_rows; ++row) {
    const T* input = logits + row * size;
    float* result = probs + row * size;
    float largest = kMinusInfinity;
#pragma omp simd reduction(max : largest)
    for (int64_t i = 0; i < size; ++i) largest = std::max(largest, widen(input[i]));
    const float temperature = temperatures[row]; // may be so small that its inverse is infinite
    double total = 0;
    for (int64_t start = 0; start < size; start += kChunk) {
      const int64_t end = std::min(start + kChunk, size);
      float sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int64_t i = start; i < end; ++i) {
        result[i] = exponential((widen(input[i]) - largest) / temperature);
        sum += result[i];
      }
      total += sum;
    }
    const float scale = static_cast<float>(1.0 / total);
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) result[i] *= scale;
  }
}

// The first of the largest entries, -1 if the largest is not finite or an entry is NaN.
template <typename T>
int64_t argmax_row(const T* logits, int64_t size) {
  float largest = kMinusInfinity;
  int has_nan = 0;
#pragma omp simd reduction(max : largest) reduction(| : has_nan)
  for (int64_t i = 0; i < size; ++i) {
    const float x = widen(logits[i]);
    largest = std::max(largest, x);
    has_nan |= x != x;
  }
  if (has_nan || !std::isfinite(largest)) return -1;
  for (int64_t start = 0; start < size; start += kChunk) {
    const int64_t end = std::min(start + kChunk, size);
    int is_here = 0;
#pragma omp simd reduction(| : is_here)
    for (int64_t i = start; i < end; ++i) is_here |= widen(logits[i]) == largest;
    if (is_here)
      for (int64_t i = start;; ++i)
        if (widen(logits[i]) == largest) return i;
  }
  return -1;
}

template <typename T>
void argmax(const T* logits, int64_t* tokens, int64_t num_rows, int64_t size) {
#pragma omp parallel for if (num_rows * size > 8 * kMaxSerial)
  for (int64_t row = 0; row < num_rows; ++row) tokens[row] = argmax_row(logits + row * size, size);
}

double sum_chunk(const float* probs, int64_t begin, int64_t end) {
  double sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = begin; i < end; ++i) sum += static_cast<double>(probs[i]);
  return sum;
}

// The first entry behind which the running sum exceeds `uniform` times the total.
int64_t draw_row(const float* probs, double uniform, int64_t size) {
  double total = 0;
  for (int64_t start = 0; start < size; start += kChunk) total += sum_chunk(probs, start, std::min(start + kChunk, size));
  const double height = std::min(uniform * total, std::nextafter(total, 0.0));
  double sum = 0;
  int64_t last = 0; // the last possible entry so far, for what rounding leaves over
  for (int64_t start = 0; start < size; start += kChunk) {
    const int64_t end = std::min(start + kChunk, size);
    const double chunk = sum_chunk(probs, start, end);
    if (sum + chunk > height) {
      double inside = 0;
      for (int64_t i = start; i < end; ++i) {
        inside += static_cast<double>(probs[i]);
        if (probs[i] > 0) last = i;
        if (sum + inside > height) return i;
      }
      return last;
    }
    sum += chunk;
  }
  return last;
}

} // namespace

extern "C" void draw_float32(const float* probs, const double* uniform, int64_t* tokens, int64_t num_rows, int64_t size) {
#pragma omp parallel for if (num_rows * size > kMaxSerial)
  for (int64_t row = 0; row < num_rows; ++row) tokens[row] = draw_row(probs + row * size, uniform[row], size);
}

#define TITAN_DEFINE_SAMPLING(T, NAME)                                                                                         \
  extern "C" void argmax_##NAME(const void* logits, int64_t* tokens, int64_t num_rows, int64_t size) {                         \
    argmax(static_cast<const T*>(logits), tokens, num_rows, size);                                                             \
  }                                                                                                                            \
  extern "C" void softmax_##NAME(const void* logits, const float* temperatures, float* probs, int64_t num_rows,                \
                                 int64_t size) {                                                                               \
    softmax(static_cast<const T*>(logits), temperatures, probs, num_rows, size);                                               \
  }
