// A ragged batch of queries over paged KV, and the location of the slots that they see.

#pragma once

#include <algorithm>
#include <cstdint>

#include "numbers.h"

extern "C" {

// One ragged batch, the same for all layers and heads. R requests, T query tokens.
struct AttentionPlan {
  int64_t num_requests;
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_dim;
  int64_t block_size;
  int64_t table_width;
  const int64_t* requests;        // [R], requests attended here, as rows of the arrays below
  const int64_t* query_start_loc; // [all requests + 1]
  const int64_t* seq_lens;        // [all requests]
  const int64_t* tree_starts;     // [all requests]
  const int64_t* block_table;     // [all requests, table_width]
  const int64_t* positions;       // [T]
  const int64_t* visible_lens;    // [T]
};
}

namespace {

constexpr int kTile = 32; // slots processed together

template <typename T>
struct Head {
  const AttentionPlan& plan;
  const T* keys;   // of this KV head: [num_blocks, block_size, D]
  const T* values; // likewise
  const int64_t* blocks;
};

// The slots of a tile, with their offsets in elements of a head.
struct Tile {
  int64_t begin;
  int64_t count;
  int64_t offsets[kTile];
};

template <typename T>
Tile find_tile(const Head<T>& head, int64_t begin, int64_t end) {
  const int64_t block_size = head.plan.block_size, head_dim = head.plan.head_dim;
  Tile tile;
  tile.begin = begin;
  tile.count = std::max<int64_t>(std::min<int64_t>(kTile, end - begin), 0);
  int64_t block = begin / block_size, rest = begin % block_size;
  for (int64_t j = 0; j < tile.count; ++j) {
    tile.offsets[j] = (head.blocks[block] * block_size + rest) * head_dim;
    if (++rest == block_size) rest = 0, ++block;
  }
  return tile;
}

inline void prefetch_bytes(const void* first, int64_t num_bytes) {
  for (int64_t byte = 0; byte < num_bytes; byte += 64) __builtin_prefetch(static_cast<const char*>(first) + byte, 0, 2);
}

// Keep the highest `window` bits set, which are the nearest ancestors, since parents come before children.
inline int64_t nearest_ancestors(int64_t bits, int64_t window) {
  while (__builtin_popcountll(bits) > window) bits &= bits - 1;
  return bits;
}

// Mask the scores of those slots of begin .. begin + count - 1 that row `token` does not see.
inline void hide(const AttentionPlan& plan, int64_t token, int64_t tree_start, int64_t bits, int64_t window, int64_t begin,
                 int64_t count, float* scores) {
  const int64_t visible_len = plan.visible_lens[token], first = plan.positions[token] - window + 1;
  if (begin + count <= visible_len && begin >= first) return;
  for (int64_t j = 0; j < count; ++j) {
    const int64_t slot = begin + j, node = slot - tree_start;
    const bool is_context = slot < visible_len && slot >= first;
    const bool is_ancestor = node >= 0 && node < 64 && ((static_cast<uint64_t>(bits) >> node) & 1);
    if (!is_context && !is_ancestor) scores[j] = kMinusInfinity;
  }
}

} // namespace
