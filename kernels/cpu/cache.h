// Clearing and moving paged KV, as bytes.

#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

extern "C" {

// [num_layers, 2, num_kv_heads, blocks, block_size, row]; strides in bytes, all but the last dimension.
struct KvCache {
  char* data;
  int64_t num_layers;
  int64_t num_kv_heads;
  int64_t block_size;
  int64_t row_bytes;
  int64_t strides[5];
};
}

namespace {

// What one layer holds of the keys, or of the values, of one head.
template <typename F>
void for_each_plane(const KvCache& cache, F&& visit) {
  for (int64_t layer = 0; layer < cache.num_layers; ++layer)
    for (int64_t kv = 0; kv < 2; ++kv)
      for (int64_t head = 0; head < cache.num_kv_heads; ++head)
        visit(cache.data + layer * cache.strides[0] + kv * cache.strides[1] + head * cache.strides[2]);
}

inline int64_t slot_offset(const KvCache& cache, int64_t slot) {
  return slot / cache.block_size * cache.strides[3] + slot % cache.block_size * cache.strides[4];
}

} // namespace

extern "C" void clear_blocks(const KvCache* cache, const int64_t* block_ids, int64_t num_blocks) {
  for_each_plane(*cache, [&](char* plane) {
    for (int64_t i = 0; i < num_blocks; ++i)
      for (int64_t offset = 0; offset < cache->block_size; ++offset)
        std::memset(plane + block_ids[i] * cache->strides[3] + offset * cache->strides[4], 0, cache->row_bytes);
  });
}

// All sources are read before a target is written.
extern "C" void move_slots(const KvCache* cache, const int64_t* sources, const int64_t* targets, int64_t num_slots) {
  std::vector<char> rows(num_slots * cache->row_bytes);
  for_each_plane(*cache, [&](char* plane) {
    for (int64_t i = 0; i < num_slots; ++i)
      std::memcpy(&rows[i * cache->row_bytes], plane + slot_offset(*cache, sources[i]), cache->row_bytes);
    for (int64_t i = 0; i < num_slots; ++i)
      std::memcpy(plane + slot_offset(*cache, targets[i]), &rows[i * cache->row_bytes], cache->row_bytes);
  });
}
