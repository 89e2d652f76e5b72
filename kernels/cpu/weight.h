// The weight of a linear layer, as Python describes it.

#pragma once

#include <cstdint>

extern "C" {

// Outputs are grouped in blocks; for each input, or pair of inputs in bfloat16, the weights of a block's outputs lie side by side.
struct Weight {
  const void* data; // [num_outputs / block, depth / pair, block, pair], padded with zeros
  const void* bias; // [num_outputs], or null
  int64_t num_outputs;
  int64_t num_inputs;
  int64_t block; // a multiple of the lanes, or 1: plain rows
  int64_t depth; // at least num_inputs: equal to it for plain rows, an even number otherwise
  int64_t is_bfloat16; // 1 or 0, whether data is; x, bias and outputs may be float32 even then
};
}

namespace {

constexpr int64_t kMaxSerialWeights = 32768; // most weights that one thread multiplies faster than several

} // namespace
