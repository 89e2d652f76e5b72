// What each row of logits says: its largest entries, and the distribution that it is sampled from.

#pragma once

#include <bit>
#include <numeric>

#include "team.h"

namespace {

constexpr int kChunk = 512;   // numbers that are summed before their sum is added to a double
constexpr int kSearched = 64; // logits skipped together if none of them is large enough

// `OPTIONS` of `titan/core/sampling_rows.py`.
struct Options {
  float temperature; // 0: the most likely token
  float top_p;
  float min_p;
  int64_t top_k;
  uint64_t seed;
  int64_t position; // of the token that is sampled
};

inline bool has_top_k(const Options& options, int64_t size) { return options.top_k > 0 && options.top_k < size; }

// Sum term(i) for i in 0 .. size - 1: in float within chunks, whose sums are added in double.
template <typename Term>
inline double sum_terms(int64_t size, const Term& term) {
  double total = 0;
  for (int64_t start = 0; start < size; start += kChunk) {
    const int64_t end = std::min(start + kChunk, size);
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = start; i < end; ++i) sum += term(i);
    total += sum;
  }
  return total;
}

// Return the largest of some logits that is not NaN, or -inf.
template <typename T>
float largest_of(const T* logits, int64_t count) {
  float largest = kMinusInfinity;
#pragma omp simd reduction(max : largest)
  for (int64_t i = 0; i < count; ++i) largest = std::max(largest, widen(logits[i]));
  return largest;
}

// Find the largest entries of a row, in descending order, ties in their order in the row; return whether none is NaN.
template <typename T>
bool largest_entries(const T* logits, int64_t* tokens, float* values, int64_t count, int64_t size) {
  std::fill_n(tokens, count, 0);
  std::fill_n(values, count, kMinusInfinity);
  int has_nan = 0;
  for (int64_t start = 0; start < size; start += kSearched) {
    const int64_t end = std::min(start + kSearched, size);
    float largest = kMinusInfinity;
#pragma omp simd reduction(max : largest) reduction(| : has_nan)
    for (int64_t i = start; i < end; ++i) {
      const float x = widen(logits[i]);
      largest = std::max(largest, x);
      has_nan |= x != x;
    }
    if (!(largest > values[count - 1])) continue;
    for (int64_t i = start; i < end; ++i) {
      const float x = widen(logits[i]);
      if (!(x > values[count - 1])) continue;
      int64_t place = count - 1;
      for (; place > 0 && x > values[place - 1]; --place) {
        tokens[place] = tokens[place - 1];
        values[place] = values[place - 1];
      }
      tokens[place] = i;
      values[place] = x;
    }
  }
  return !has_nan;
}

// Return the index of the largest entry, the first of ties; -1 if it is not finite or an entry is NaN.
template <typename T>
int64_t argmax_row(const T* logits, int64_t size) {
  int64_t token;
  float largest;
  return largest_entries(logits, &token, &largest, 1, size) && std::isfinite(largest) ? token : -1;
}

// Find the largest entries of a row and their log-probabilities at a temperature.
template <typename T>
void top_candidates_row(const T* logits, float temperature, int64_t* tokens, float* logprobs, int64_t count, int64_t size) {
  largest_entries(logits, tokens, logprobs, count, size);
  const float largest = logprobs[0];
  const double total = sum_terms(size, [=](int64_t i) { return exponential((widen(logits[i]) - largest) / temperature); });
  const float log_total = static_cast<float>(std::log(total));
  for (int64_t i = 0; i < count; ++i) logprobs[i] = (logprobs[i] - largest) / temperature - log_total;
}

// A token that cuts may keep.
struct Entry {
  float logit;
  float weight; // exp((logit - the largest) / temperature)
  int64_t token;
};

// Whether a token is more likely than another; of equal ones, the first is.
inline bool is_likelier(const Entry& a, const Entry& b) { return a.logit != b.logit ? a.logit > b.logit : a.token < b.token; }

inline double mass_of(const Entry* begin, const Entry* end) {
  return std::accumulate(begin, end, 0.0, [](double sum, const Entry& each) { return sum + each.weight; });
}

// Put the fewest of the likeliest entries whose weights add up to `mass` first, or all; return how many these are, at least one.
inline int64_t find_nucleus(std::vector<Entry>& entries, double mass) {
  Entry* const data = entries.data();
  int64_t first = 0, end = entries.size(); // it ends behind the first of these at least, and before `end` or there
  while (end - first > 1) {
    const int64_t middle = first + (end - first) / 2;
    std::nth_element(data + first, data + middle, data + end, is_likelier);
    const double likelier = mass_of(data + first, data + middle);
    if (likelier >= mass)
      end = middle;
    else
      mass -= likelier, first = middle;
  }
  return first + 1;
}

// Return the largest weight from which on the weights of a row, of at most 1, add up to `mass`; the bits of such numbers are in their
// order.
inline float weight_reaching(const float* weights, double mass, int64_t size) {
  int32_t low = 0, high = std::bit_cast<int32_t>(1.0f);
  while (low < high) {
    const int32_t middle = low + (high - low + 1) / 2;
    const float least = std::bit_cast<float>(middle);
    const double sum = sum_terms(size, [=](int64_t i) { return weights[i] >= least ? weights[i] : 0.0f; });
    if (sum >= mass)
      low = middle;
    else
      high = middle - 1;
  }
  return std::bit_cast<float>(low);
}

// Return a logit that `count` entries of a row reach, and few others do: of groups of entries, so many have one that does.
template <typename T>
float reached_by(const T* logits, int64_t count, int64_t size) {
  std::vector<float> peaks;
  for (int64_t start = 0; start < size; start += kSearched)
    peaks.push_back(largest_of(logits + start, std::min<int64_t>(kSearched, size - start)));
  if (count > static_cast<int64_t>(peaks.size())) return kMinusInfinity;
  std::nth_element(peaks.begin(), peaks.begin() + count - 1, peaks.end(), std::greater<>());
  return peaks[count - 1];
}

// Cut a row of weights, which add up to `total`, by top-k, top-p and min-p; return what those that are left add up to.
template <typename T>
double cut_row(const T* logits, const Options& options, double total, float* weights, int64_t size) {
  float above = -1;        // tokens that weigh more are kept
  std::vector<Entry> some; // and these
  const auto keep = [&](const auto& is_kept) {
    for (int64_t i = 0; i < size; ++i)
      if (is_kept(i)) some.push_back({widen(logits[i]), weights[i], i});
  };
  if (has_top_k(options, size)) {
    above = std::numeric_limits<float>::infinity();
    const float least = reached_by(logits, options.top_k, size);
    keep([&](int64_t i) { return widen(logits[i]) >= least; });
    if (options.top_k < static_cast<int64_t>(some.size())) {
      std::nth_element(some.begin(), some.begin() + options.top_k, some.end(), is_likelier);
      some.resize(options.top_k);
    }
    if (options.top_p < 1) some.resize(find_nucleus(some, options.top_p * mass_of(some.data(), some.data() + some.size())));
  } else if (options.top_p < 1) {
    above = weight_reaching(weights, options.top_p * total, size);
    keep([&](int64_t i) { return weights[i] == above; });
    const double mass = sum_terms(size, [=](int64_t i) { return weights[i] > above ? weights[i] : 0.0f; });
    some.resize(find_nucleus(some, options.top_p * total - mass));
  }
  std::erase_if(some, [&](const Entry& each) { return each.weight < options.min_p; });
  const float least = options.min_p;
  const double others = sum_terms(size, [=](int64_t i) {
    return weights[i] = weights[i] > above && weights[i] >= least ? weights[i] : 0.0f;
  });
  for (const Entry& each : some) weights[each.token] = each.weight;
  return others + mass_of(some.data(), some.data() + some.size());
}

// Compute the distribution that a row is sampled from. At a temperature of 0 it is on one token; of equal ones, cuts keep the first.
// It is NaN if the largest logit is not finite, or one is NaN.
template <typename T>
void distribution_row(const T* logits, const Options& options, float* probs, int64_t size) {
  if (options.temperature == 0) {
    const int64_t token = argmax_row(logits, size);
    std::fill_n(probs, size, token < 0 ? std::numeric_limits<float>::quiet_NaN() : 0.0f);
    if (token >= 0) probs[token] = 1;
    return;
  }
  const float largest = largest_of(logits, size);
  double total = sum_terms(size, [=](int64_t i) { // the inverse of a tiny temperature may be infinite
    return probs[i] = exponential((widen(logits[i]) - largest) / options.temperature);
  });
  const bool has_cuts = has_top_k(options, size) || options.top_p < 1 || options.min_p > 0;
  if (has_cuts && std::isfinite(total)) total = cut_row(logits, options, total, probs, size);
  const float scale = static_cast<float>(1.0 / total);
#pragma omp simd
  for (int64_t i = 0; i < size; ++i) probs[i] *= scale;
}

template <typename T>
void argmax(Team* team, const T* logits, int64_t* tokens, int64_t num_rows, int64_t size) {
  share(team, num_rows, size / 8, [&](int64_t row) { tokens[row] = argmax_row(logits + row * size, size); });
}

template <typename T>
void distributions(Team* team, const T* logits, const Options* options, float* probs, int64_t num_rows, int64_t size) {
  share(team, num_rows, size, [&](int64_t row) { distribution_row(logits + row * size, options[row], probs + row * size, size); });
}

template <typename T>
void top_candidates(Team* team, const T* logits, const float* temperatures, int64_t* tokens, float* logprobs, int64_t num_rows,
                   int64_t size, int64_t count) {
  share(team, num_rows, size, [&](int64_t row) {
    top_candidates_row(logits + row * size, temperatures[row], tokens + row * count, logprobs + row * count, count, size);
  });
}

} // namespace
