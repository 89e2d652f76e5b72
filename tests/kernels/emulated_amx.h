// The tiles of AMX in plain C++, included before the kernels (-include) to test them on processors without the units.

#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig emulated::load_config
#define _tile_release emulated::release
#define _tile_zero emulated::zero
#define _tile_loadd emulated::load
#define _tile_stored emulated::store
#define _tile_dpbf16ps emulated::multiply
#define __AMX_BF16__ 1

namespace emulated {

struct Tile {
  int rows, row_bytes;
  unsigned char data[16][64];
};

inline thread_local Tile tiles[8];

inline void load_config(const void* config) {
  const unsigned char* bytes = static_cast<const unsigned char*>(config);
  for (int i = 0; i < 8; ++i) {
    uint16_t row_bytes;
    std::memcpy(&row_bytes, bytes + 16 + 2 * i, sizeof row_bytes);
    tiles[i] = Tile{bytes[48 + i], row_bytes, {}};
  }
}

inline void release() {
  for (Tile& tile : tiles) tile = Tile{};
}

inline void zero(int i) { std::memset(tiles[i].data, 0, sizeof tiles[i].data); }

inline void load(int i, const void* from, int64_t stride) {
  zero(i);
  for (int row = 0; row < tiles[i].rows; ++row)
    std::memcpy(tiles[i].data[row], static_cast<const char*>(from) + row * stride, tiles[i].row_bytes);
}

inline void store(int i, void* to, int64_t stride) {
  for (int row = 0; row < tiles[i].rows; ++row)
    std::memcpy(static_cast<char*>(to) + row * stride, tiles[i].data[row], tiles[i].row_bytes);
}

inline float as_float(uint32_t bits) {
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

// Add a [rows, pairs] times b [pairs, columns] to sums [rows, columns]: column beside column, for the compiler's vectors.
inline void multiply(int sums, int a, int b) {
  for (int row = 0; row < tiles[sums].rows; ++row) {
    float totals[16];
    std::memcpy(totals, tiles[sums].data[row], sizeof totals);
    for (int pair = 0; pair < tiles[a].row_bytes / 4; ++pair) {
      uint32_t factors, others[16];
      std::memcpy(&factors, tiles[a].data[row] + 4 * pair, sizeof factors);
      std::memcpy(others, tiles[b].data[pair], sizeof others);
      for (int column = 0; column < 16; ++column) totals[column] += as_float(factors << 16) * as_float(others[column] << 16);
      for (int column = 0; column < 16; ++column)
        totals[column] += as_float(factors & 0xffff0000u) * as_float(others[column] & 0xffff0000u);
    }
    std::memcpy(tiles[sums].data[row], totals, tiles[sums].row_bytes);
  }
}

} // namespace emulated
