// A ragged batch of queries over paged KV, what a layer computes of it, and the slots of the cache: their layout, what is written to
// them, and where those are that queries see.
//
// S is the type of the stored numbers. A KV head's part of a block is [block_size, D] numbers; int8 numbers are followed by one float
// scale per slot, which multiplies them: they may be read beyond head_dim; a block has 8 slots or more, so that this stays inside of it. A
// row of zeros has a scale, too, and a row with a number that is not finite has the scale NaN. Slots that are hidden from a row may be
// multiplied by 0: they must be finite.

#pragma once

#include "numbers.h"

namespace {

// The cache of a layer; strides are in elements. Of a block, the parts of all planes and KV heads best lie side by side.
struct KVLayer {
  void* data;
  int64_t plane_stride; // from keys to values
  int64_t head_stride;
  int64_t block_stride;
  int64_t block_size; // slots
  int64_t is_quantised;
};

// One ragged batch, the same for all layers and heads. R requests, some of them without queries; T query tokens.
struct AttentionPlan {
  int64_t num_requests;
  int64_t table_width;
  const int64_t* query_start_loc; // [R + 1]
  const int64_t* seq_lens;        // [R]
  const int64_t* tree_starts;     // [R]
  const int64_t* block_table;     // [R, table_width]
  const int64_t* positions;       // [T]
  const int64_t* visible_lens;    // [T]
  const int64_t* ancestor_bits;   // [T]
};

// What the attention of a layer computes; see `titan.core.attention.LayerSpec`.
struct AttentionSpec {
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_dim;
  float scale;
  float softcap;      // scores become softcap * tanh(score / softcap); 0: they stay
  int64_t window;     // positions that a query attends to, or those of a chunk
  int64_t is_chunked; // whether it attends to those from the start of its chunk on
  int64_t value_dim;  // at most head_dim
  int64_t is_latent;  // whether the cache holds keys only, whose first numbers are the values
  const float* sinks; // [num_heads], or null
};

template <typename S>
constexpr bool kIsQuantised = std::is_same_v<S, int8_t>;

// Call `work` with a number of the type that the cache of a model of type T holds.
template <typename T, typename Work>
inline void with_stored(const KVLayer& kv, const Work& work) {
  kv.is_quantised ? work(int8_t{}) : work(T{});
}

constexpr float kLargestNumber = 127.0f; // of those quantised
constexpr float kLeastSize = 1e-30f;     // as which a row's largest number counts if it is less: below about 4e-33, numbers become zeros

// Round numbers to integers up to `most`, below 2^22; return what 1 stands for, NaN if a number is not finite.
template <typename T, typename Integer>
inline float round_to_integers(const T* numbers, int64_t count, float most, Integer* integers) {
  float largest = kLeastSize;
  int are_finite = 1;
#pragma omp simd reduction(max : largest) reduction(& : are_finite)
  for (int64_t i = 0; i < count; ++i) {
    const float x = widen(numbers[i]);
    largest = std::max(largest, std::fabs(x));
    are_finite &= std::isfinite(x);
  }
  const float factor = most / largest;
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    const float rounded = (widen(numbers[i]) * factor + 12582912.0f) - 12582912.0f; // the sum holds no fraction
    integers[i] = static_cast<Integer>(static_cast<int32_t>(rounded));
  }
  return are_finite ? largest / most : std::numeric_limits<float>::quiet_NaN();
}

// Return a KV head's part of the first block.
template <typename S>
inline S* first_block(const KVLayer& kv, int64_t plane, int64_t head) {
  return static_cast<S*>(kv.data) + plane * kv.plane_stride + head * kv.head_stride;
}

// Write a row of `size` numbers, at most head_dim, to its slot of a KV head; the rest of the slot stays.
template <typename S, typename T>
inline void write_slot(const T* row, int64_t size, const KVLayer& kv, int64_t plane, int64_t head, int64_t slot, int64_t head_dim) {
  const int64_t place = slot % kv.block_size;
  S* block = first_block<S>(kv, plane, head) + slot / kv.block_size * kv.block_stride;
  S* numbers = block + place * head_dim;
  if constexpr (kIsQuantised<S>) {
    const float scale = round_to_integers(row, size, kLargestNumber, numbers);
    std::memcpy(block + kv.block_size * head_dim + place * sizeof scale, &scale, sizeof scale);
  } else {
    static_assert(std::is_same_v<S, T>);
    std::memcpy(numbers, row, size * sizeof(T));
  }
}

constexpr int kTile = 32; // slots processed together

// Rows of one request and some of its KV heads that one thread attends: row r of a KV head is query r / group of its head r % group.
struct AttentionItem {
  int64_t request;
  int64_t first_row;
  int64_t num_rows;
  int64_t first_head;
  int64_t num_heads;
};

// The rows of an item for one of its KV heads, counted from its first row, and what they attend to.
template <typename S>
struct Head {
  const AttentionPlan& plan;
  const AttentionSpec& spec;
  const AttentionItem& item;
  const KVLayer& kv; // of numbers of type S
  int64_t kv_head = item.first_head;
  int64_t group = spec.num_heads / spec.num_kv_heads;
  const S* keys = first_block<S>(kv, 0, kv_head);
  const S* values = first_block<S>(kv, !spec.is_latent, kv_head); // the keys where they are latents

  // Return the same for another head of the item.
  Head at(int64_t index) const { return {plan, spec, item, kv, item.first_head + index, group}; }

  // Return how many positions the query `token` attends to.
  int64_t window(int64_t token) const { return spec.is_chunked ? plan.positions[token] % spec.window + 1 : spec.window; }

  // Return the first slot that it sees, and one behind the last.
  int64_t first_slot(int64_t token) const { return std::max<int64_t>(plan.positions[token] - window(token) + 1, 0); }
  int64_t end_slot(int64_t token) const {
    const uint64_t bits = plan.ancestor_bits[token];
    const int64_t tree_end = bits ? tree_start() + 64 - __builtin_clzll(bits) : 0;
    return std::min(std::max(plan.visible_lens[token], tree_end), plan.seq_lens[item.request]);
  }

  int64_t token(int64_t row) const { return plan.query_start_loc[item.request] + (item.first_row + row) / group; }
  int64_t query_head(int64_t row) const { return kv_head * group + (item.first_row + row) % group; }
  int64_t tree_start() const { return plan.tree_starts[item.request]; }
};

// What a row sees besides its ancestors, and one behind the last slot that it sees.
struct RowSlots {
  int64_t first;
  int64_t visible_len;
  int64_t end;
};

// The slots of a tile, with their offsets in elements of a head; behind its end, those of its last slot.
struct Tile {
  int64_t begin;
  int64_t count;
  int64_t offsets[kTile];
};

// Call `work` for each run of slots that lie side by side: the first, its end, the offset of their block, the first's place in it.
template <typename S, typename Work>
inline void for_runs(const Head<S>& head, int64_t begin, int64_t count, const Work& work) {
  const int64_t block_size = head.kv.block_size, *blocks = head.plan.block_table + head.item.request * head.plan.table_width;
  for (int64_t j = 0; j < count;) {
    const int64_t slot = begin + j, run_end = std::min(j + block_size - slot % block_size, count);
    work(j, run_end, blocks[slot / block_size] * head.kv.block_stride, slot % block_size);
    j = run_end;
  }
}

template <typename S>
Tile find_tile(const Head<S>& head, int64_t begin, int64_t end) {
  const int64_t head_dim = head.spec.head_dim;
  Tile tile;
  tile.begin = begin;
  tile.count = std::max<int64_t>(std::min<int64_t>(kTile, end - begin), 0);
  for_runs(head, begin, tile.count, [&](int64_t j, int64_t run_end, int64_t block, int64_t place) {
    for (int64_t i = j; i < run_end; ++i) tile.offsets[i] = block + (place + i - j) * head_dim;
  });
  for (int64_t j = tile.count; j < kTile; ++j) tile.offsets[j] = tile.offsets[std::max<int64_t>(tile.count - 1, 0)];
  return tile;
}

// Always inline: GCC takes calls of a function that only prefetches for useless, and leaves them out.
template <typename T>
__attribute__((always_inline)) inline void prefetch_numbers(const T* numbers, int64_t count) {
  for (int64_t i = 0; i < count; i += 64 / sizeof(T)) __builtin_prefetch(numbers + i, 0, kToL2);
}

// Keep the highest `window` bits set, which are the nearest ancestors, since parents come before children.
inline int64_t nearest_ancestors(int64_t bits, int64_t window) {
  while (__builtin_popcountll(bits) > window) bits &= bits - 1;
  return bits;
}

// Cap scores: softcap * tanh(factor * score / softcap), where tanh(x) is 2 * sigmoid(2 * x) - 1, with an error of some 2^-23 of the cap.
// Not inline, so that the loops of layers without a cap stay short.
[[gnu::noinline]] void cap_scores(float* scores, int64_t count, float factor, float softcap) {
  const float twice = 2.0f * factor / softcap;
#pragma omp simd
  for (int64_t j = 0; j < count; ++j) scores[j] = softcap * (2.0f * sigmoid(scores[j] * twice) - 1.0f);
}

// Mask the scores of those slots of a tile that a row does not see.
template <typename S>
inline void hide(const Head<S>& head, int64_t row, RowSlots seen, const Tile& tile, float* scores) {
  std::fill(scores + tile.count, scores + kTile, kMinusInfinity);
  if (tile.begin + tile.count <= seen.visible_len && tile.begin >= seen.first) return;
  const int64_t token = head.token(row);
  const uint64_t bits = nearest_ancestors(head.plan.ancestor_bits[token], head.window(token));
  for (int64_t j = 0; j < tile.count; ++j) {
    const int64_t slot = tile.begin + j, node = slot - head.tree_start();
    const bool is_context = slot < seen.visible_len && slot >= seen.first;
    const bool is_ancestor = node >= 0 && node < 64 && (bits >> node & 1);
    if (!is_context && !is_ancestor) scores[j] = kMinusInfinity;
  }
}

// The scales of a tile of quantised slots; 1 behind its end.
struct TileScales {
  float keys[kTile];
  float values[kTile];
};

inline TileScales find_scales(const Head<int8_t>& head, const Tile& tile) {
  TileScales scales;
  for_runs(head, tile.begin, tile.count, [&](int64_t j, int64_t run_end, int64_t block, int64_t place) {
    const int64_t offset = block + head.kv.block_size * head.spec.head_dim + place * sizeof(float);
    std::memcpy(scales.keys + j, head.keys + offset, (run_end - j) * sizeof(float));
    std::memcpy(scales.values + j, head.values + offset, (run_end - j) * sizeof(float));
  });
  std::fill(scales.keys + tile.count, scales.keys + kTile, 1.0f);
  std::fill(scales.values + tile.count, scales.values + kTile, 1.0f);
  return scales;
}

// Multiply numbers of a tile by the scales of its slots.
inline void multiply(float* numbers, const float* scales) {
  for (int64_t j = 0; j < kTile; j += kLanes) store(load_lanes(numbers + j) * load_lanes(scales + j), numbers + j);
}

// The largest integers of weights, and those of queries of so many dimensions, whose products with slots have sums of 32 bits.
constexpr float kLargestWeight = 32767.0f;
static_assert(kTile * kLargestWeight * kLargestNumber < 2147483648.0f);

inline float largest_query(int64_t dim) { return std::min(32767.0f, std::floor(2147483520.0f / (kLargestNumber * dim))); }

} // namespace
