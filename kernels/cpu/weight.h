// The weight of a linear layer, as Python packs it: see `weights.py`.

#pragma once

#include <cstdint>

enum WeightFormat : int64_t { kFloat32 = 0, kFloat16 = 1, kPairs = 2, kCodes = 3, kShortCodes = 4 };

struct Weight {
  // [blocks, inputs, kBlock], or pairs of bfloat16, [blocks, inputs / 2, kBlock, 2], or codes of these, see `codes.h`; padded with zeros
  const void* data;
  const void* bias; // [num_outputs] of the model's type, or null
  int64_t num_outputs;
  int64_t num_inputs;
  WeightFormat format;
};

namespace {

constexpr int kBlock = 16;      // outputs side by side
constexpr int kPairInputs = 32; // numbers of inputs that pairs are padded to, and of outputs: those of tiles of the matrix units

inline int64_t round_up(int64_t size, int64_t step) { return (size + step - 1) / step * step; }

inline bool is_of_pairs(const Weight& weight) { return weight.format >= kPairs; }

// Number of inputs with their padding.
inline int64_t depth_of(const Weight& weight) {
  return is_of_pairs(weight) ? round_up(weight.num_inputs, kPairInputs) : weight.num_inputs;
}

} // namespace
