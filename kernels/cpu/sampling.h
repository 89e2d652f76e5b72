// Of sampling: random numbers, the largest logits, softmax at a temperature, draws, and rejection.

#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>

#include "numbers.h"

namespace {

constexpr int kChunk = 512; // numbers summed before their sum goes to a double
constexpr int kSearched = 64; // numbers that are passed over together if none of them is large enough

// Uniform in (0, 1) by Philox 4x32-10; key = seed, counter = (position, stream, 0, 0).
inline double uniform_number(uint64_t seed, uint32_t position, uint32_t stream) {
  uint32_t c0 = position, c1 = stream, c2 = 0, c3 = 0;
  uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = static_cast<uint64_t>(c0) * 0xD2511F53u, product1 = static_cast<uint64_t>(c2) * 0xCD9E8D57u;
    c0 = static_cast<uint32_t>(product1 >> 32) ^ c1 ^ key0;
    c1 = static_cast<uint32_t>(product1);
    c2 = static_cast<uint32_t>(product0 >> 32) ^ c3 ^ key1;
    c3 = static_cast<uint32_t>(product0);
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  const uint64_t bits = static_cast<uint64_t>(c0) << 20 | c1 >> 12;
  return (static_cast<double>(bits) + 0.5) * 0x1p-52; // half a step, lest 0 or 1 comes out
}

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

// The largest entries of a row, descending, the first of equal ones first, and their log-probabilities at a temperature.
template <typename T>
void best_children_row(const T* logits, float temperature, int64_t* tokens, float* logprobs, int64_t count, int64_t size) {
  std::fill_n(tokens, count, 0);
  std::fill_n(logprobs, count, kMinusInfinity);
  for (int64_t start = 0; start < size; start += kSearched) {
    const int64_t end = std::min(start + kSearched, size);
    float largest = kMinusInfinity;
#pragma omp simd reduction(max : largest)
    for (int64_t i = start; i < end; ++i) largest = std::max(largest, widen(logits[i]));
    if (!(largest > logprobs[count - 1])) continue;
    for (int64_t i = start; i < end; ++i) {
      const float x = widen(logits[i]);
      if (!(x > logprobs[count - 1])) continue;
      int64_t place = count - 1;
      for (; place > 0 && x > logprobs[place - 1]; --place) {
        tokens[place] = tokens[place - 1];
        logprobs[place] = logprobs[place - 1];
      }
      tokens[place] = i;
      logprobs[place] = x;
    }
  }
  const float largest = logprobs[0];
  double total = 0;
  for (int64_t start = 0; start < size; start += kChunk) {
    const int64_t end = std::min(start + kChunk, size);
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = start; i < end; ++i) sum += exponential((widen(logits[i]) - largest) / temperature);
    total += sum;
  }
  const float log_total = static_cast<float>(std::log(total));
  for (int64_t i = 0; i < count; ++i) logprobs[i] = (logprobs[i] - largest) / temperature - log_total;
}

template <typename T>
void best_children(const T* logits, const float* temperatures, int64_t* tokens, float* logprobs, int64_t num_rows, int64_t size,
                   int64_t count) {
#pragma omp parallel for if (num_rows * size > kMaxSerial)
  for (int64_t row = 0; row < num_rows; ++row)
    best_children_row(logits + row * size, temperatures[row], tokens + row * count, logprobs + row * count, count, size);
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

// As many draws as the row has children, none of them twice; -1 where no token is left.
void draw_siblings_row(const float* probs, const double* uniform, int64_t num_children, int64_t* tokens, int64_t count,
                       int64_t size) {
  std::fill_n(tokens, count, -1);
  std::unique_ptr<float[]> left; // the row without the tokens drawn before, once there are any
  for (int64_t rank = 0; rank < num_children; ++rank) {
    const float* row = left ? left.get() : probs;
    const int64_t token = draw_row(row, uniform[rank], size);
    if (!(row[token] > 0)) return;
    tokens[rank] = token;
    if (rank + 1 == num_children) return;
    if (!left) {
      left.reset(new float[size]);
      std::copy_n(probs, size, left.get());
    }
    left[token] = 0;
  }
}

// max(p - s q, 0); returns its sum.
double residual_row(const float* probs, const float* draft_probs, float scale, float* rest, int64_t size) {
  double total = 0;
  for (int64_t start = 0; start < size; start += kChunk) {
    const int64_t end = std::min(start + kChunk, size);
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = start; i < end; ++i) {
      rest[i] = std::max(probs[i] - scale * draft_probs[i], 0.0f);
      sum += rest[i];
    }
    total += sum;
  }
  return total;
}

// Trees one after the other: the rows of each are its root's, then its nodes'.
struct SampledTrees {
  const float* probs; // [rows, size], the target's
  const float* draft_probs; // [inner nodes, size]
  const int64_t* draft_rows; // [rows], which of draft_probs; -1 for a leaf
  const int64_t* token_ids; // [nodes]
  const int32_t* parents; // [nodes], -1 for the root
  const int64_t* node_start_loc; // [trees + 1]
  const double* coins; // [nodes]
  const double* uniform; // [rows]
};

// Recursive rejection, see `titan/verify/rejection.py`. Children come after their parents, so that one pass walks the tree.
void reject_tree(const SampledTrees& trees, int64_t tree, int64_t size, int64_t* last_row, int64_t* final_token) {
  const int64_t first = trees.node_start_loc[tree], end = trees.node_start_loc[tree + 1];
  const int64_t root = first + tree;
  const std::unique_ptr<float[]> rest(new float[size]);
  int64_t row = root;
  double scale = 0, mass = 1, drawn = 0; // s, m and Q of the children tried so far
  for (int64_t node = first; node < end; ++node) {
    if (root + 1 + trees.parents[node] != row) continue;
    const float* probs = trees.probs + row * size;
    const float* draft_probs = trees.draft_probs + trees.draft_rows[row] * size;
    const int64_t token = trees.token_ids[node];
    const double p = probs[token], q = draft_probs[token];
    if (drawn > 0) mass = residual_row(probs, draft_probs, static_cast<float>(scale), rest.get(), size);
    const double left = std::max(1 - drawn, q); // q is part of it, whatever rounding says
    if (trees.coins[node] < std::max(p - scale * q, 0.0) * left / (mass * q)) {
      row = root + 1 + node - first;
      scale = 0, mass = 1, drawn = 0;
    } else {
      scale += mass / left;
      drawn += q;
    }
  }
  const float* probs = trees.probs + row * size;
  *last_row = row;
  if (!std::isfinite(probs[0])) {
    *final_token = -1;
    return;
  }
  const float* draft_probs = trees.draft_probs + trees.draft_rows[row] * size;
  const bool is_rest = trees.draft_rows[row] >= 0 &&
                       residual_row(probs, draft_probs, static_cast<float>(scale), rest.get(), size) > 0; // else rounding left none
  *final_token = draw_row(is_rest ? rest.get() : probs, trees.uniform[row], size);
}

// How often the draft's most likely token and one drawn from it would be accepted.
void match_rows(const float* probs, const float* draft_probs, float* matches, int64_t size) {
  const int64_t best = argmax_row(draft_probs, size);
  matches[0] = best < 0 ? std::numeric_limits<float>::quiet_NaN() : probs[best];
  double total = 0;
  for (int64_t start = 0; start < size; start += kChunk) {
    const int64_t end = std::min(start + kChunk, size);
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = start; i < end; ++i) sum += std::min(probs[i], draft_probs[i]);
    total += sum;
  }
  matches[1] = static_cast<float>(total);
}

} // namespace

extern "C" void uniform_numbers(const uint64_t* seeds, const int64_t* positions, const int64_t* streams, double* uniform,
                                int64_t size) {
  for (int64_t i = 0; i < size; ++i)
    uniform[i] = uniform_number(seeds[i], static_cast<uint32_t>(positions[i]), static_cast<uint32_t>(streams[i]));
}

extern "C" void draw_siblings(const float* probs, const double* uniform, const int64_t* num_children, int64_t* tokens,
                              int64_t num_rows, int64_t size, int64_t count) {
#pragma omp parallel for if (num_rows * size > kMaxSerial)
  for (int64_t row = 0; row < num_rows; ++row)
    draw_siblings_row(probs + row * size, uniform + row * count, num_children[row], tokens + row * count, count, size);
}

extern "C" void reject_trees(const float* probs, const float* draft_probs, const int64_t* draft_rows, const int64_t* token_ids,
                             const int32_t* parents, const int64_t* node_start_loc, const double* coins, const double* uniform,
                             int64_t* last_rows, int64_t* final_tokens, float* matches, int64_t num_trees, int64_t size) {
  const SampledTrees trees{probs, draft_probs, draft_rows, token_ids, parents, node_start_loc, coins, uniform};
#pragma omp parallel for if (num_trees * size > kMaxSerial)
  for (int64_t tree = 0; tree < num_trees; ++tree) {
    const int64_t root = node_start_loc[tree] + tree;
    reject_tree(trees, tree, size, last_rows + tree, final_tokens + tree);
    match_rows(probs + root * size, draft_probs + draft_rows[root] * size, matches + 2 * tree, size);
  }
}

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
  }                                                                                                                            \
  extern "C" void best_children_##NAME(const void* logits, const float* temperatures, int64_t* tokens, float* logprobs,        \
                                       int64_t num_rows, int64_t size, int64_t count) {                                        \
    best_children(static_cast<const T*>(logits), temperatures, tokens, logprobs, num_rows, size, count);                       \
  }
