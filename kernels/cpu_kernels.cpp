// Kernels for a CPU. Of a layer: ragged tree attention over paged KV, rotation and KV write, RMSNorm, gated activation. Of
// sampling: the largest logit, softmax at a temperature, and a draw.
//
// Plain C++ that a compiler vectorises, OpenMP for threads. All arithmetic is float32. `cpu_library.py` compiles this
// file; `compiled_ops.py` and `row_sampling.py` call the functions at its end, and tell shapes and meanings. T is the type of the tensors.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

namespace {

constexpr int kTile = 32;             // slots looked at together
constexpr int kLanes = 16;            // numbers in a vector
constexpr int kChunk = 512;           // numbers summed before their sum goes to a double
constexpr int64_t kMaxSerial = 16384; // elements that one thread does faster than several
constexpr float kHidden = -std::numeric_limits<float>::infinity();

typedef float Lanes __attribute__((vector_size(kLanes * sizeof(float))));
typedef float LooseLanes __attribute__((vector_size(kLanes * sizeof(float)), aligned(sizeof(float))));

#ifdef __clang__
#define TITAN_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
typedef int32_t LaneIndex __attribute__((vector_size(kLanes * sizeof(int32_t))));
#define TITAN_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, LaneIndex{__VA_ARGS__})
#endif

struct BFloat16 {
  uint16_t bits;
};

inline float widen(float x) { return x; }

inline float widen(BFloat16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

inline void narrow(float x, float* result) { *result = x; }

inline void narrow(float x, BFloat16* result) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const uint32_t rounded = bits + 0x7fff + ((bits >> 16) & 1); // to nearest, ties to even
  result->bits = static_cast<uint16_t>((x == x ? rounded : bits | 0x400000) >> 16);
}

// exp(x) for x <= 0, within 2 ulp: 2^n times a polynomial in the rest (Cephes, expf). Below -87, where 2^n ends, it is 0.
inline float exponential(float argument) {
  const float x = std::max(argument, -87.0f);
  const float n = std::nearbyint(x * 1.44269504088896341f);
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float y = 1.9875691500e-4f;
  y = y * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * r * r + r + 1.0f;
  const uint32_t power = static_cast<uint32_t>(static_cast<int32_t>(std::max(-126.0f, n) + 127.0f)) << 23;
  float scale;
  std::memcpy(&scale, &power, sizeof scale);
  return argument < -87.0f ? 0.0f : y * scale;
}

inline float sigmoid(float x) {
  const float e = exponential(-std::fabs(x));
  return (x >= 0 ? 1.0f : e) / (1.0f + e);
}

} // namespace

extern "C" {

// One ragged batch, the same for all layers and heads. R requests, T query tokens.
struct AttentionPlan {
  int64_t num_requests;
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_dim;
  int64_t block_size;
  int64_t table_width;
  int64_t has_trees;
  const int64_t* requests;        // [R] those attended here, as rows of the arrays below
  const int64_t* query_start_loc; // [all requests + 1]
  const int64_t* seq_lens;        // [all requests]
  const int64_t* tree_starts;     // [all requests]
  const int64_t* block_table;     // [all requests, table_width]
  const int64_t* positions;       // [T]
  const int64_t* visible_lens;    // [T]
};
}

namespace {

// Query rows of one request that share a KV head, and what they have gathered so far.
struct RowState {
  std::vector<float> queries; // [rows, width], scaled
  std::vector<float> sums;    // [rows, width], of values by weight
  std::vector<float> largest; // [rows], largest score
  std::vector<float> totals;  // [rows], of weights
};

template <typename T>
struct Head {
  const AttentionPlan& plan;
  const T* keys;   // of this KV head: [num_blocks, block_size, D]
  const T* values; // likewise
  const int64_t* blocks;

  const T* key(int64_t slot) const { return keys + offset(slot); }
  const T* value(int64_t slot) const { return values + offset(slot); }
  int64_t offset(int64_t slot) const {
    return (blocks[slot / plan.block_size] * plan.block_size + slot % plan.block_size) * plan.head_dim;
  }
};

// Ask for a tile's keys and values while something else is worked on.
template <typename T>
void prefetch_tile(const Head<T>& head, int64_t begin, int64_t end) {
  const int64_t num_bytes = head.plan.head_dim * static_cast<int64_t>(sizeof(T));
  for (int64_t slot = begin; slot < std::min(begin + kTile, end); ++slot) {
    for (int64_t byte = 0; byte < num_bytes; byte += 64) {
      __builtin_prefetch(reinterpret_cast<const char*>(head.key(slot)) + byte, 0, 2);
      __builtin_prefetch(reinterpret_cast<const char*>(head.value(slot)) + byte, 0, 2);
    }
  }
}

// Keys and values as float32 [kTile, width], zero beyond the head's dimension.
template <typename T, int D>
void load_tile(const Head<T>& head, int64_t begin, int64_t count, int64_t width, float* keys, float* values) {
  const int64_t head_dim = D ? D : head.plan.head_dim, row = D ? D : width;
  for (int64_t j = 0; j < count; ++j) {
    const T* key = head.key(begin + j);
    const T* value = head.value(begin + j);
#pragma omp simd
    for (int64_t d = 0; d < head_dim; ++d) {
      keys[j * row + d] = widen(key[d]);
      values[j * row + d] = widen(value[d]);
    }
    for (int64_t d = head_dim; d < row; ++d) keys[j * row + d] = values[j * row + d] = 0.0f;
  }
}

// The sum over the lanes of each of 16 vectors: pairs are added, half of one beside half of the other, until one is left.
inline Lanes sum_lanes(Lanes* x) {
  for (int i = 0; i < 8; ++i)
    x[i] = TITAN_SHUFFLE(x[i], x[i + 8], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
           TITAN_SHUFFLE(x[i], x[i + 8], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
  for (int i = 0; i < 4; ++i)
    x[i] = TITAN_SHUFFLE(x[i], x[i + 4], 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) +
           TITAN_SHUFFLE(x[i], x[i + 4], 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
  for (int i = 0; i < 2; ++i)
    x[i] = TITAN_SHUFFLE(x[i], x[i + 2], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
           TITAN_SHUFFLE(x[i], x[i + 2], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
  return TITAN_SHUFFLE(x[0], x[1], 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) +
         TITAN_SHUFFLE(x[0], x[1], 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
}

// Scores of one query with the keys of a tile; those from `count` on mean nothing.
template <int D>
inline void score_tile(const float* query, const float* keys, int64_t count, int64_t width, float* scores) {
  const int64_t row = D ? D : width;
  for (int64_t start = 0; start < count; start += kLanes) {
    Lanes products[kLanes];
    for (int j = 0; j < kLanes; ++j) {
      const float* key = keys + (start + j) * row;
      Lanes sum = {};
      for (int64_t d = 0; d < row; d += kLanes)
        sum += *reinterpret_cast<const LooseLanes*>(query + d) * *reinterpret_cast<const LooseLanes*>(key + d);
      products[j] = sum;
    }
    *reinterpret_cast<LooseLanes*>(scores + start) = sum_lanes(products);
  }
}

// Hide what row `token` does not see among slots begin .. begin + count - 1.
inline void hide(const AttentionPlan& plan, int64_t token, int64_t tree_start, int64_t bits, int64_t window, int64_t begin,
                 int64_t count, float* scores) {
  const int64_t visible_len = plan.visible_lens[token], first = plan.positions[token] - window + 1;
  if (begin + count <= visible_len && begin >= first) return;
  for (int64_t j = 0; j < count; ++j) {
    const int64_t slot = begin + j, node = slot - tree_start;
    const bool is_context = slot < visible_len && slot >= first;
    const bool is_ancestor = plan.has_trees && node >= 0 && node < 64 && ((static_cast<uint64_t>(bits) >> node) & 1);
    if (!is_context && !is_ancestor) scores[j] = kHidden;
  }
}

// Add a tile to a row's weighted sum of values (online softmax: Milakov and Gimelshein, 2018).
template <int D>
inline void add_tile(float* scores, const float* values, int64_t count, int64_t width, float* sums, float* largest, float* total) {
  const int64_t row = D ? D : width;
  float tile_largest = *largest;
  int has_nan = 0; // which the largest score does not show
#pragma omp simd reduction(max : tile_largest) reduction(| : has_nan)
  for (int64_t j = 0; j < count; ++j) {
    tile_largest = std::max(tile_largest, scores[j]);
    has_nan |= scores[j] != scores[j];
  }
  if (has_nan) {
    *total = std::numeric_limits<float>::quiet_NaN();
    return;
  }
  if (tile_largest == kHidden) return;
  float tile_total = 0;
#pragma omp simd reduction(+ : tile_total)
  for (int64_t j = 0; j < count; ++j) {
    const float weight = exponential(scores[j] - tile_largest);
    scores[j] = weight;
    tile_total += weight;
  }
  const float kept = exponential(*largest - tile_largest);
  *total = *total * kept + tile_total;
  *largest = tile_largest;
  for (int64_t start = 0; start < row; start += 4 * kLanes) { // so many sums fit into registers
    const int num_vectors = D ? 4 : static_cast<int>(std::min<int64_t>(4, (row - start) / kLanes));
    Lanes part[4];
    for (int i = 0; i < num_vectors; ++i) part[i] = *reinterpret_cast<LooseLanes*>(sums + start + i * kLanes) * kept;
    for (int64_t j = 0; j < count; ++j)
      for (int i = 0; i < num_vectors; ++i)
        part[i] += scores[j] * *reinterpret_cast<const LooseLanes*>(values + j * row + start + i * kLanes);
    for (int i = 0; i < num_vectors; ++i) *reinterpret_cast<LooseLanes*>(sums + start + i * kLanes) = part[i];
  }
}

template <typename T, int D>
void attend_head(const AttentionPlan& plan, int64_t request, int64_t kv_head, const T* q, int64_t q_stride, const T* kv_layer,
                 int64_t head_stride, const int64_t* ancestor_bits, T* output, float scale, int64_t window) {
  static thread_local RowState state;
  static thread_local std::vector<float> tile;
  const int64_t head_dim = D ? D : plan.head_dim, group = plan.num_heads / plan.num_kv_heads;
  const int64_t first_token = plan.query_start_loc[request];
  const int64_t num_rows = (plan.query_start_loc[request + 1] - first_token) * group;
  const int64_t width = (head_dim + kLanes - 1) / kLanes * kLanes;
  state.queries.assign(num_rows * width, 0.0f);
  state.sums.assign(num_rows * width, 0.0f);
  state.largest.assign(num_rows, kHidden);
  state.totals.assign(num_rows, 0.0f);
  tile.resize(2 * kTile * width);
  float* keys = tile.data();
  float* values = keys + kTile * width;

  int64_t first_slot = std::numeric_limits<int64_t>::max();
  for (int64_t row = 0; row < num_rows; ++row) {
    const int64_t token = first_token + row / group;
    first_slot = std::min(first_slot, plan.positions[token] - window + 1);
    const T* query = q + token * q_stride + (kv_head * group + row % group) * head_dim;
    for (int64_t d = 0; d < head_dim; ++d) state.queries[row * width + d] = widen(query[d]) * scale;
  }

  const Head<T> head{plan, kv_layer + kv_head * head_stride, kv_layer + (plan.num_kv_heads + kv_head) * head_stride,
                     plan.block_table + request * plan.table_width};
  const int64_t end = plan.seq_lens[request];
  for (int64_t begin = std::max<int64_t>(first_slot, 0) / kTile * kTile; begin < end; begin += kTile) {
    const int64_t count = std::min<int64_t>(kTile, end - begin);
    prefetch_tile(head, begin + kTile, end);
    load_tile<T, D>(head, begin, count, width, keys, values);
    for (int64_t row = 0; row < num_rows; ++row) {
      const int64_t token = first_token + row / group;
      float scores[kTile];
      score_tile<D>(&state.queries[row * width], keys, count, width, scores);
      hide(plan, token, plan.tree_starts[request], ancestor_bits[token], window, begin, count, scores);
      add_tile<D>(scores, values, count, width, &state.sums[row * width], &state.largest[row], &state.totals[row]);
    }
  }

  for (int64_t row = 0; row < num_rows; ++row) {
    T* result = output + (first_token + row / group) * plan.num_heads * head_dim + (kv_head * group + row % group) * head_dim;
    const float factor = 1.0f / state.totals[row];
    for (int64_t d = 0; d < head_dim; ++d) narrow(state.sums[row * width + d] * factor, &result[d]);
  }
}

template <typename T>
void tree_attention(const AttentionPlan& plan, const T* q, int64_t q_stride, const T* kv_layer, int64_t head_stride,
                    const int64_t* ancestor_bits, T* output, float scale, int64_t window) {
  int64_t num_slots = 0;
  for (int64_t i = 0; i < plan.num_requests; ++i) num_slots += plan.seq_lens[plan.requests[i]];
  const int64_t num_items = plan.num_requests * plan.num_kv_heads;
#pragma omp parallel for schedule(dynamic) if (num_slots * plan.num_kv_heads * plan.head_dim > kMaxSerial)
  for (int64_t item = 0; item < num_items; ++item) {
    const auto attend = plan.head_dim == 64 ? attend_head<T, 64> : plan.head_dim == 128 ? attend_head<T, 128> : attend_head<T, 0>;
    attend(plan, plan.requests[item / plan.num_kv_heads], item % plan.num_kv_heads, q, q_stride, kv_layer, head_stride,
           ancestor_bits, output, scale, window);
  }
}

template <typename T>
float inverse_rms(const T* x, int64_t size, float eps) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < size; ++i) sum += widen(x[i]) * widen(x[i]);
  return 1.0f / std::sqrt(sum / static_cast<float>(size) + eps);
}

// One element of RMSNorm; rounded before the weight, as in transformers.
template <typename T>
inline float normed(T x, float factor, T weight) {
  T rounded;
  narrow(widen(x) * factor, &rounded);
  return widen(rounded) * widen(weight);
}

template <typename T>
void rms_norm(const T* x, const T* weight, T* output, int64_t num_rows, int64_t size, float eps) {
#pragma omp parallel for if (num_rows * size > kMaxSerial)
  for (int64_t row = 0; row < num_rows; ++row) {
    const T* input = x + row * size;
    T* result = output + row * size;
    const float factor = inverse_rms(input, size, eps);
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) narrow(normed(input[i], factor, weight[i]), &result[i]);
  }
}

template <typename T>
void rope_and_write_kv(T* qkv, const T* rope_table, const int64_t* positions, const int64_t* slot_mapping, T* kv_layer,
                       int64_t head_stride, const T* qk_norm, float eps, int64_t num_tokens, int64_t num_heads,
                       int64_t num_kv_heads, int64_t head_dim) {
  const int64_t num_qk_heads = num_heads + num_kv_heads, token_size = (num_qk_heads + num_kv_heads) * head_dim;
  const int64_t half = head_dim / 2;
#pragma omp parallel for if (num_tokens * token_size > kMaxSerial)
  for (int64_t token = 0; token < num_tokens; ++token) {
    const T* cos = rope_table + positions[token] * 2 * head_dim;
    const T* sin = cos + head_dim; // its first half is negative
    static thread_local std::vector<float> buffer;
    buffer.resize(head_dim);
    float* head = buffer.data();
    for (int64_t index = 0; index < num_qk_heads; ++index) {
      T* input = qkv + token * token_size + index * head_dim;
      const bool is_key = index >= num_heads;
      if (is_key && slot_mapping[token] < 0) break; // a token whose KV is not kept
      T* result = is_key ? kv_layer + (index - num_heads) * head_stride + slot_mapping[token] * head_dim : input;
      if (qk_norm) {
        const float factor = inverse_rms(input, head_dim, eps);
        for (int64_t d = 0; d < head_dim; ++d) {
          T rounded;
          narrow(normed(input[d], factor, qk_norm[index * head_dim + d]), &rounded);
          head[d] = widen(rounded);
        }
      } else {
#pragma omp simd
        for (int64_t d = 0; d < head_dim; ++d) head[d] = widen(input[d]);
      }
#pragma omp simd
      for (int64_t d = 0; d < half; ++d) {
        narrow(head[d] * widen(cos[d]) + head[d + half] * widen(sin[d]), &result[d]);
        narrow(head[d + half] * widen(cos[d + half]) + head[d] * widen(sin[d + half]), &result[d + half]);
      }
    }
    for (int64_t index = 0; index < num_kv_heads && slot_mapping[token] >= 0; ++index)
      std::memcpy(kv_layer + (num_kv_heads + index) * head_stride + slot_mapping[token] * head_dim,
                  qkv + token * token_size + (num_qk_heads + index) * head_dim, head_dim * sizeof(T));
  }
}

template <typename T>
void silu_mul(const T* gate_up, T* output, int64_t num_rows, int64_t size) {
#pragma omp parallel for if (num_rows * size > kMaxSerial)
  for (int64_t row = 0; row < num_rows; ++row) {
    const T* gate = gate_up + row * 2 * size;
    const T* up = gate + size;
    T* result = output + row * size;
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) {
      const float x = widen(gate[i]);
      narrow(x * sigmoid(x) * widen(up[i]), &result[i]);
    }
  }
}

template <typename T>
void softmax(const T* logits, const float* temperatures, float* probs, int64_t num_rows, int64_t size) {
#pragma omp parallel for if (num_rows * size > kMaxSerial)
  for (int64_t row = 0; row < num_rows; ++row) {
    const T* input = logits + row * size;
    float* result = probs + row * size;
    float largest = kHidden;
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
  float largest = kHidden;
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

#define TITAN_DEFINE(T, NAME)                                                                                                  \
  extern "C" void tree_attention_##NAME(const AttentionPlan* plan, const void* q, int64_t q_stride, const void* kv_layer,      \
                                        int64_t head_stride, const int64_t* ancestor_bits, void* output, float scale,          \
                                        int64_t window) {                                                                      \
    tree_attention(*plan, static_cast<const T*>(q), q_stride, static_cast<const T*>(kv_layer), head_stride, ancestor_bits,     \
                   static_cast<T*>(output), scale, window);                                                                    \
  }                                                                                                                            \
  extern "C" void rms_norm_##NAME(const void* x, const void* weight, void* output, int64_t num_rows, int64_t size,             \
                                  float eps) {                                                                                 \
    rms_norm(static_cast<const T*>(x), static_cast<const T*>(weight), static_cast<T*>(output), num_rows, size, eps);           \
  }                                                                                                                            \
  extern "C" void rope_and_write_kv_##NAME(void* qkv, const void* rope_table, const int64_t* positions,                        \
                                           const int64_t* slot_mapping, void* kv_layer, int64_t head_stride,                   \
                                           const void* qk_norm, float eps, int64_t num_tokens, int64_t num_heads,              \
                                           int64_t num_kv_heads, int64_t head_dim) {                                           \
    rope_and_write_kv(static_cast<T*>(qkv), static_cast<const T*>(rope_table), positions, slot_mapping,                        \
                      static_cast<T*>(kv_layer), head_stride, static_cast<const T*>(qk_norm), eps, num_tokens, num_heads,      \
                      num_kv_heads, head_dim);                                                                                 \
  }                                                                                                                            \
  extern "C" void argmax_##NAME(const void* logits, int64_t* tokens, int64_t num_rows, int64_t size) {                         \
    argmax(static_cast<const T*>(logits), tokens, num_rows, size);                                                             \
  }                                                                                                                            \
  extern "C" void softmax_##NAME(const void* logits, const float* temperatures, float* probs, int64_t num_rows,                \
                                 int64_t size) {                                                                               \
    softmax(static_cast<const T*>(logits), temperatures, probs, num_rows, size);                                               \
  }                                                                                                                            \
  extern "C" void silu_mul_##NAME(const void* gate_up, void* output, int64_t num_rows, int64_t size) {                         \
    silu_mul(static_cast<const T*>(gate_up), static_cast<T*>(output), num_rows, size);                                         \
  }

TITAN_DEFINE(float, float32)
TITAN_DEFINE(BFloat16, bfloat16)
