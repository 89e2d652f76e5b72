// Products of rows with packed weights.

#pragma once

#include "amx.h"

namespace {

// Whether what is said to be packed is codes.
template <typename Packed>
constexpr bool kIsCoded = requires { Packed::kIsShort; };

// Write sums [num_vectors, num_rows] of outputs from `first` on, with bias and residual stream. Not inline: for each number of rows and
// blocks, it would take the compiler longer than the products.
template <typename T>
[[gnu::noinline]] void write_strip(const Lanes* sums, int num_vectors, int num_rows, const Weight& weight, int64_t first, const T* residual,
                                   T* output) {
  const T* bias = static_cast<const T*>(weight.bias);
  for (int v = 0; v < num_vectors; ++v, first += kLanes) {
    for (int row = 0; row < num_rows; ++row) {
      const int64_t place = row * weight.num_outputs + first;
      write_sums(*sums++, weight.num_outputs - first, bias ? bias + first : nullptr, residual ? residual + place : nullptr, output + place);
    }
  }
}

// Whether seven rows are six and one, not three and four, where one row takes more blocks at a time than six do.
constexpr bool has_row_alone(int64_t num_rows) { return num_rows == kMostRows + 1 && most_blocks(1) > most_blocks(kMostRows); }

// Call work(first, count) for rows that are multiplied together, in groups of nearly equal size.
template <typename Work>
void for_groups(int64_t num_rows, const Work& work) {
  if (!has_row_alone(num_rows)) return for_parts(num_rows, kMostRows, work);
  work(0, kMostRows);
  work(kMostRows, 1);
}

// Multiply rows in groups; those after the first find the strip of the weight in the cache.
template <typename Packed, typename T, typename X>
void multiply_by_vectors(Member& member, const Weight& weight, const X* x, int64_t num_rows, const T* residual, T* output) {
  const bool is_alone = has_row_alone(num_rows);
  const int64_t least_rows = num_rows / ((num_rows + kMostRows - 1) / kMostRows), most = most_blocks(is_alone ? 1 : least_rows);
  const int64_t num_blocks = (weight.num_outputs + kBlock - 1) / kBlock, depth = depth_of(weight);
  member.share((num_blocks + most - 1) / most, num_rows * depth * most * kBlock, [&](int64_t strip) {
    const int64_t begin = strip * most, end = std::min(begin + most, num_blocks);
    static thread_local WorkingMemory memory;
    const int64_t size = (end - begin) * kBlock * depth;
    const bool keeps = kIsCoded<Packed> && num_rows >= kKeptRows<X> && (is_alone || least_rows >= kLeastKept) && size <= kKeptNumbers;
    BFloat16* kept = keeps ? memory.room_for<BFloat16>(size) : nullptr;
    for_groups(num_rows, [&](int64_t first, int64_t count) {
      const int64_t place = first * weight.num_outputs;
      const X* rows = x + first * depth;
      with_constant<kMostRows>(count, [&](auto m) {
        const auto multiply = [&](int64_t block, auto b) {
          constexpr int M = m, B = b;
          Lanes sums[B * kParts][M];
          if constexpr (kIsCoded<Packed>)
            multiply_codes<M, B, Packed>(rows, weight, block, keeps ? kept + (block - begin) * kBlock * depth : nullptr, first > 0, sums);
          else
            multiply_blocks<M, B>(rows, static_cast<const Packed*>(weight.data) + block * kBlock * depth, depth, sums);
          write_strip(sums[0], B * kParts, M, weight, block * kBlock, residual ? residual + place : nullptr, output + place);
        };
        int64_t block = begin;
        for (; block + most_blocks(m) <= end; block += most_blocks(m)) multiply(block, std::integral_constant<int, most_blocks(m)>{});
        for (; block < end; ++block) multiply(block, std::integral_constant<int, 1>{}); // of the last strip: other numbers take long to compile
      });
    });
  });
}

// Number of lines of working memory that `linear` needs for so many rows, or fewer.
template <typename T>
int64_t linear_lines(const Weight& weight, int64_t num_rows) {
#ifdef TITAN_HAS_AMX
  if (weight.format >= kPairs) return prepared_lines<BFloat16, T>(weight, std::min(num_rows, most_cached_rows<T>(depth_of(weight))));
#endif
  return prepared_lines<Row<T>, T>(weight, num_rows);
}

// Multiply x [num_rows, num_inputs] by the weight, and add its bias and the residual stream [num_rows, num_outputs] if given.
template <typename T>
void linear(Member& member, const Weight& weight, const T* x, int64_t num_rows, const T* residual, T* output, Line* room) {
  if (num_rows == 0) return; // of a pass without logits
#ifdef TITAN_HAS_AMX
  if (weight.format == kPairs) return multiply_by_tiles<16>(member, weight, x, num_rows, residual, output, room);
  if (weight.format == kCodes) return multiply_by_tiles<12>(member, weight, x, num_rows, residual, output, room);
  if (weight.format == kShortCodes) return multiply_by_tiles<8>(member, weight, x, num_rows, residual, output, room);
#endif
  const Row<T>* rows = prepare_rows<Row<T>>(member, weight, x, num_rows, room);
  if constexpr (std::is_same_v<T, float>) {
    if (weight.format == kFloat32) return multiply_by_vectors<float>(member, weight, rows, num_rows, residual, output);
    if (weight.format == kFloat16) return multiply_by_vectors<Float16>(member, weight, rows, num_rows, residual, output);
  }
#ifdef TITAN_HAS_CODES
  if (weight.format == kCodes) return multiply_by_vectors<Codes<12>>(member, weight, rows, num_rows, residual, output);
  if (weight.format == kShortCodes) return multiply_by_vectors<Codes<8>>(member, weight, rows, num_rows, residual, output);
#endif
  multiply_by_vectors<BFloat16>(member, weight, rows, num_rows, residual, output);
}

// The same, on the threads.
template <typename T>
void run_linear(Team* team, const Weight& weight, const T* x, int64_t num_rows, const T* residual, T* output) {
  const auto memory = team->working_memory();
  Line* room = memory->lines(linear_lines<T>(weight, num_rows));
  team->run([&](Member& member) { linear(member, weight, x, num_rows, residual, output, room); });
}

// Copy the weights of an output to `result`, [num_inputs].
template <typename T>
void unpack_row(const Weight& weight, int64_t row, T* result) {
#ifdef TITAN_HAS_CODES
  if (weight.format == kCodes) return unpack_codes<Codes<12>>(weight, row, result);
  if (weight.format == kShortCodes) return unpack_codes<Codes<8>>(weight, row, result);
#endif
  const int64_t size = weight.num_inputs, first = row / kBlock * kBlock * depth_of(weight), lane = row % kBlock;
  if (weight.format == kPairs) {
    unpack_pairs(static_cast<const BFloat16*>(weight.data) + first, lane, size, result);
  } else {
    const auto copy = [&](const auto* numbers) {
      for (int64_t d = 0; d < size; ++d) narrow(load_lanes(numbers + first + d * kBlock + lane / kLanes * kLanes)[lane % kLanes], &result[d]);
    };
    weight.format == kFloat16 ? copy(static_cast<const Float16*>(weight.data)) : copy(static_cast<const float*>(weight.data));
  }
}

// Copy rows of the weight to `output`, [num_rows, num_inputs].
template <typename T>
void unpack_rows(Team* team, const Weight& weight, const int64_t* rows, int64_t num_rows, T* output) {
  share(team, num_rows, weight.num_inputs, [&](int64_t i) { unpack_row(weight, rows[i], output + i * weight.num_inputs); });
}

} // namespace
