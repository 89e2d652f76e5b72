// Checks products and attention of the kernels against plain loops in double; a program, so that it can run under an emulator.
//
// Prints the largest error of each check in units of its bound; the exit status is the number of those above 1.

#include <cstdio>
#include <random>

#include "../../kernels/cpu/attention.h"
#include "../../kernels/cpu/linear.h"

namespace {

std::mt19937 generator(0);

// For numbers that bfloat16 holds, of a size usual for weights.
inline void narrow(float x, Float16* result) {
  const uint32_t bits = reinterpret<uint32_t>(x);
  result->bits = std::fabs(x) < 1e-4f ? 0 : static_cast<uint16_t>(bits >> 16 & 0x8000 | ((bits & 0x7fffffff) - (112u << 23)) >> 13);
}

template <typename T>
std::vector<T> random_numbers(int64_t count, bool are_held_by_bfloat16 = false) {
  std::normal_distribution<float> normal;
  std::vector<T> numbers(count);
  for (T& number : numbers) {
    BFloat16 half;
    const float drawn = normal(generator), x = std::fabs(drawn) < 1e-4f ? 0.0f : drawn;
    narrow(x, &half);
    narrow(are_held_by_bfloat16 ? widen(half) : x, &number);
  }
  return numbers;
}

template <typename T>
constexpr double kEps = std::is_same_v<T, float> ? 6e-8 : 4e-3;

// Of weighted sums of values; queries and weights are rounded to 16 bits where slots are quantised.
template <typename S>
constexpr double kSumEps = kIsQuantised<S> ? 1e-4 : 1e-6;

int report(const char* name, double error) {
  std::printf("%-40s %.3f\n", name, error);
  return error <= 1.0 ? 0 : 1;
}

// Pack weights [num_outputs, num_inputs] by the formula of weights.py.
template <typename Packed, typename T>
std::vector<Line> pack(const std::vector<T>& weights, int64_t num_outputs, int64_t num_inputs, int64_t depth) {
  std::vector<Line> lines(num_lines<Packed>(round_up(num_outputs, kPairInputs) * depth), Line{});
  Packed* packed = reinterpret_cast<Packed*>(lines.data());
  for (int64_t output = 0; output < num_outputs; ++output)
    for (int64_t input = 0; input < num_inputs; ++input)
      narrow(widen(weights[output * num_inputs + input]),
             &packed[output / kBlock * depth * kBlock + input / kPair<Packed> * kBlock * kPair<Packed> +
                     output % kBlock * kPair<Packed> + input % kPair<Packed>]);
  return lines;
}

template <typename Packed>
constexpr WeightFormat kFormat = std::is_same_v<Packed, BFloat16> ? kPairs : std::is_same_v<Packed, Float16> ? kFloat16 : kFloat32;

template <typename T, typename Packed>
int check_linear(const char* name) {
  Team team(2);
  double worst = 0;
  for (const auto& [num_outputs, num_inputs] : {std::pair{16, 32}, {48, 64}, {33, 31}, {100, 70}, {17, 1}, {320, 96}}) {
    const auto weights = random_numbers<T>(num_outputs * num_inputs, !std::is_same_v<Packed, float>);
    const auto bias = random_numbers<T>(num_outputs);
    Weight weight{nullptr, bias.data(), num_outputs, num_inputs, kFormat<Packed>};
    const auto packed = pack<Packed>(weights, num_outputs, num_inputs, depth_of(weight));
    weight.data = packed.data();
    for (const int64_t num_rows : {1, 2, 5, 7, 8, 9, 16, 33}) {
      const auto x = random_numbers<T>(num_rows * num_inputs), residual = random_numbers<T>(num_rows * num_outputs);
      std::vector<T> output(num_rows * num_outputs);
      std::vector<Line> room(linear_lines<T>(weight, num_rows));
      team.run([&](Member& member) { linear(member, weight, x.data(), num_rows, residual.data(), output.data(), room.data()); });
      for (int64_t row = 0; row < num_rows; ++row)
        for (int64_t i = 0; i < num_outputs; ++i) {
          double exact = double(widen(bias[i])) + widen(residual[row * num_outputs + i]), size = std::abs(exact);
          for (int64_t k = 0; k < num_inputs; ++k) {
            const double product = double(widen(x[row * num_inputs + k])) * widen(weights[i * num_inputs + k]);
            exact += product, size += std::abs(product);
          }
          const double bound = kEps<T> * std::abs(exact) + 1e-6 * size;
          worst = std::max(worst, std::abs(widen(output[row * num_outputs + i]) - exact) / bound);
        }
    }
  }
  return report(name, worst);
}

// Two requests: a chunk of 70 queries, and a query with a tree of 3 nodes below it, two of them siblings.
// S is the type of the stored numbers; of what a layer may have beyond a window, it has all or nothing.
template <typename T, typename S = T>
int check_attention(const char* name, int64_t head_dim, int64_t window, bool has_all = false) {
  constexpr int64_t kHeads = 4, kKvHeads = 2, kBlockSize = 16, kBlocks = 16, kWidth = 8;
  const int64_t start_loc[] = {0, 70, 74}, seq_lens[] = {100, 54}, tree_starts[] = {0, 51};
  std::vector<int64_t> table(2 * kWidth), positions(74), visible(74), bits(74, 0);
  for (int64_t i = 0; i < 2 * kWidth; ++i) table[i] = (5 * i + 3) % kBlocks;
  for (int64_t i = 0; i < 70; ++i) positions[i] = 30 + i, visible[i] = 31 + i;
  positions[70] = 50, visible[70] = 51;
  for (int64_t i = 0; i < 3; ++i) positions[71 + i] = 51 + (i == 1), visible[71 + i] = 51;
  bits[71] = 1, bits[72] = 3, bits[73] = 4;
  const AttentionPlan plan{2, kWidth, start_loc, seq_lens, tree_starts, table.data(), positions.data(), visible.data(), bits.data()};
  const float sinks[] = {-1.0f, 0.5f, 2.0f, 0.0f}, softcap = has_all ? 2.0f : 0.0f;
  const int64_t value_dim = has_all ? head_dim - 3 : head_dim;
  const AttentionSpec spec{kHeads, kKvHeads, head_dim, 0.2f, softcap, window, has_all, value_dim, has_all, has_all ? sinks : nullptr};
  const int64_t num_slots = kBlocks * kBlockSize, part = kBlockSize * (head_dim + (kIsQuantised<S> ? sizeof(float) : 0));
  const auto q = random_numbers<T>(74 * kHeads * head_dim), numbers = random_numbers<T>(2 * kKvHeads * num_slots * head_dim);
  std::vector<S> cache(kBlocks * 2 * kKvHeads * part);
  const KVLayer kv{cache.data(), kKvHeads * part, part, 2 * kKvHeads * part, kBlockSize, kIsQuantised<S>};
  for (int64_t i = 0; i < 2 * kKvHeads * num_slots; ++i) {
    const int64_t head = i / num_slots; // of both planes
    write_slot<S>(&numbers[i * head_dim], head_dim, kv, head / kKvHeads, head % kKvHeads, i % num_slots, head_dim);
  }
  const auto stored = [&](int64_t head, int64_t slot, int64_t d) {
    const S* block = first_block<S>(kv, head / kKvHeads, head % kKvHeads) + slot / kBlockSize * kv.block_stride;
    if constexpr (kIsQuantised<S>) {
      const double scale = reinterpret_cast<const float*>(block + kBlockSize * head_dim)[slot % kBlockSize];
      const double number = scale * block[slot % kBlockSize * head_dim + d];
      const double error = std::abs(number - widen(numbers[(head * num_slots + slot) * head_dim + d]));
      return error <= 0.5001 * scale ? number : std::nan("");
    } else {
      return double(widen(block[slot % kBlockSize * head_dim + d]));
    }
  };
  std::vector<T> output(74 * kHeads * value_dim);
  Team team(2);
  const auto items = attention_items(plan, spec, team.num_threads());
  team.run([&](Member& member) { tree_attention(member, plan, spec, items, q.data(), kHeads * head_dim, kv, output.data()); });
  double worst = 0;
  for (int64_t token = 0; token < 74; ++token)
    for (int64_t head = 0; head < kHeads; ++head) {
      const int64_t request = token >= 70;
      std::vector<double> result(value_dim, 0.0);
      double total = has_all ? std::exp(double(sinks[head])) : 0, size = 0;
      const int64_t first = has_all ? positions[token] / window * window : positions[token] - window + 1;
      for (int64_t slot = 0; slot < seq_lens[request]; ++slot) {
        const int64_t node = request ? slot - tree_starts[1] : -1;
        const bool is_context = slot < visible[token] && slot >= first;
        const int64_t depth = node == 1 ? 1 : 0; // of the node below the first one
        const bool is_ancestor = node >= 0 && (bits[token] >> node & 1) && 51 + depth >= first;
        if (!is_context && !is_ancestor) continue;
        const int64_t place = table[request * kWidth + slot / kBlockSize] * kBlockSize + slot % kBlockSize;
        const auto key = [&](int64_t d) { return stored(head / 2, place, d); };
        const auto value = [&](int64_t d) { return stored((has_all ? 0 : kKvHeads) + head / 2, place, d); };
        double score = 0;
        for (int64_t d = 0; d < head_dim; ++d) score += double(widen(q[(token * kHeads + head) * head_dim + d])) * key(d);
        const double weight = std::exp(has_all ? softcap * std::tanh(0.2 * score / softcap) : 0.2 * score);
        total += weight;
        for (int64_t d = 0; d < value_dim; ++d) result[d] += weight * value(d), size = std::max(size, std::abs(value(d)));
      }
      for (int64_t d = 0; d < value_dim; ++d) {
        const double exact = result[d] / total, found = widen(output[(token * kHeads + head) * value_dim + d]);
        const double error = std::abs(found - exact) / (kEps<T> * std::abs(exact) + (kEps<T> + kSumEps<S>) * size);
        worst = error <= worst ? worst : error; // NaN stays
      }
    }
  return report(name, worst);
}

} // namespace

int main() {
  int failures = check_linear<float, float>("linear, float32") + check_linear<float, BFloat16>("linear, float32 by pairs") +
                 check_linear<float, Float16>("linear, float32 by float16") + check_linear<BFloat16, BFloat16>("linear, bfloat16");
  for (const int64_t head_dim : {8, 40, 64, 96, 128}) {
    failures += check_attention<float>("attention, float32", head_dim, int64_t{1} << 40);
    failures += check_attention<BFloat16>("attention, bfloat16", head_dim, int64_t{1} << 40);
    failures += check_attention<float, int8_t>("attention, float32, quantised", head_dim, int64_t{1} << 40);
    failures += check_attention<BFloat16, int8_t>("attention, bfloat16, quantised", head_dim, 20);
    failures += check_attention<float>("attention, float32, window", head_dim, 20);
    failures += check_attention<BFloat16>("attention, bfloat16, window", head_dim, 20);
    failures += check_attention<float>("attention, float32, all", head_dim, 20, true);
    failures += check_attention<BFloat16, int8_t>("attention, bfloat16, quantised, all", head_dim, 20, true);
  }
  return failures;
}
