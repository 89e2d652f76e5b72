// Attention in bfloat16 on the matrix units of Intel processors.
//
// Scores are computed as [slots, queries], one vector per slot, so that softmax needs no sums over lanes. All data of a query
// stays in its lane or row, so that its result does not depend on its neighbours.

#pragma once

#include "amx.h"
#include "attention_plan.h"

namespace {

#ifdef TITAN_HAS_AMX

constexpr int kSlotPairs = kTile / 2;
constexpr float kLog2E = 1.44269504088896341f;
static_assert(kLanes == kTileRows && kTile == kTileInputs, "a tile of the units holds so many queries, and so many slots");

// Up to 16 query rows that share a KV head, one in each lane.
struct QueryTile {
  Lanes largest;             // largest scores, base 2
  Lanes totals;              // sums of weights
  Integers visible_lens;     // slots below these are visible
  Integers first_slots;      // if not before these,
  Integers ancestor_bits[2]; // and so are nodes whose bits are set: bits 0 to 31 and 32 to 63
  int32_t fully_visible_from; // slots that all queries see
  int32_t fully_visible_to;
};

// Working memory of a thread; every 16 lines are a tile of the units.
struct TileRoom {
  std::vector<QueryTile> tiles;
  std::vector<Line> queries; // [tiles, D / 32, 16 pairs of dimensions, 16 queries], bfloat16
  std::vector<Line> sums;    // [tiles, V / 32, 2, 16 queries, 16], weighted sums of values, in their order
  std::vector<Line> keys;    // [kTile, D], bfloat16, of quantised slots
  std::vector<Line> values;  // [V / 32, 2, 16 pairs of slots, 16], bfloat16; even dimensions, then odd ones, or halves if quantised
  Line scores[kTile];        // [slots, queries]
  Line weights[kTileRows];   // [queries, 16 pairs of slots], bfloat16
};

// Widen 16 integers of 8 bits each of two rows, or of two parts of one, to pairs; bfloat16 holds them exactly.
inline Words widen_pairs(const int8_t* first, const int8_t* second) {
  const auto widened = [](const int8_t* numbers) {
    return reinterpret<Words>(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load<__m128i>(numbers))));
  };
  return widened(first) >> 16 | widened(second);
}

inline Lanes* lanes_of(Line* line) { return reinterpret_cast<Lanes*>(line->lanes); }

// Return which queries see a slot: all bits of their lanes are set.
inline Integers see(const QueryTile& tile, int32_t slot, int64_t node) {
  const Integers is_context = (tile.visible_lens > slot) & (tile.first_slots <= slot);
  if (node < 0 || node >= 64) return is_context;
  return is_context | -(tile.ancestor_bits[node / 32] >> static_cast<int32_t>(node % 32) & 1);
}

// Load the rows of one tile: queries in the layout of the units, and what they see.
template <typename S>
inline void load_queries(const Head<S>& head, int64_t first_row, int64_t num_rows, const BFloat16* q, int64_t q_stride,
                         QueryTile* tile, Line* queries) {
  const BFloat16* rows[kTileRows];
  *tile = QueryTile{};
  tile->largest += kMinusInfinity;
  tile->fully_visible_to = std::numeric_limits<int32_t>::max();
  for (int64_t i = 0; i < num_rows; ++i) {
    const int64_t row = first_row + i, token = head.token(row);
    rows[i] = q + token * q_stride + head.query_head(row) * head.spec.head_dim;
    if (const float* sinks = head.spec.sinks) tile->largest[i] = sinks[head.query_head(row)] * kLog2E, tile->totals[i] = 1.0f;
    const int64_t bits = nearest_ancestors(head.plan.ancestor_bits[token], head.window(token));
    tile->visible_lens[i] = static_cast<int32_t>(head.plan.visible_lens[token]);
    tile->first_slots[i] = static_cast<int32_t>(head.first_slot(token));
    tile->ancestor_bits[0][i] = static_cast<int32_t>(bits);
    tile->ancestor_bits[1][i] = static_cast<int32_t>(bits >> 32);
    tile->fully_visible_from = std::max<int32_t>(tile->fully_visible_from, tile->first_slots[i]);
    tile->fully_visible_to = std::min<int32_t>(tile->fully_visible_to, tile->visible_lens[i]);
  }
  for (int64_t d = 0; d < head.spec.head_dim; d += kTileInputs) {
    Words words[kTileRows] = {};
    for (int64_t i = 0; i < num_rows; ++i) {
      if constexpr (kIsQuantised<S>) // in the order of widened keys
        words[i] = reinterpret<Words>(load_lanes(rows[i] + d)) >> 16 | reinterpret<Words>(load_lanes(rows[i] + d + kLanes));
      else
        std::memcpy(words + i, rows[i] + d, sizeof *words);
    }
    transpose(words);
    std::memcpy(queries + d / 2, words, sizeof words);
  }
}

// Load the values of a tile of slots, as pairs, and prefetch the next tile's keys and values.
template <int D, typename S>
void load_values(const Head<S>& head, const Tile& tile, const Tile& next, Line* values) {
  const int64_t head_dim = D ? D : head.spec.head_dim, value_dim = D ? D : head.spec.value_dim;
  for (int64_t j = 0; j < kTile; j += 2) {
    for (int64_t each = j; each < std::min(j + 2, next.count); ++each) {
      prefetch_numbers(head.keys + next.offsets[each], head_dim);
      if (!head.spec.is_latent) prefetch_numbers(head.values + next.offsets[each], value_dim);
    }
    for (int64_t d = 0; d < value_dim; d += kTileInputs) {
      Words low, high;
      if constexpr (kIsQuantised<S>) {
        const S *first = head.values + tile.offsets[j] + d, *second = head.values + tile.offsets[j + 1] + d;
        low = widen_pairs(first, second), high = widen_pairs(first + kLanes, second + kLanes);
      } else {
        Words first = {}, second = {}; // zeros where there is no slot: the units multiply them, too
        if (j < tile.count) std::memcpy(&first, head.values + tile.offsets[j] + d, sizeof first);
        if (j + 1 < tile.count) std::memcpy(&second, head.values + tile.offsets[j + 1] + d, sizeof second);
        low = (first & 0xffffu) | second << 16, high = first >> 16 | (second & 0xffff0000u); // even dimensions, odd ones
      }
      std::memcpy(values + d + j / 2, &low, sizeof low);
      std::memcpy(values + d + kSlotPairs + j / 2, &high, sizeof high);
    }
  }
}

// Compute the scores of a tile of slots, whose keys are two runs of 16.
template <int D>
inline void score_queries(int64_t dim, const BFloat16* const (&keys)[2], const Line* queries, Line* scores) {
  const int64_t head_dim = D ? D : dim, stride = head_dim * sizeof(BFloat16);
  _tile_zero(0);
  _tile_zero(1);
  for (int64_t d = 0; d < head_dim; d += kTileInputs) {
    _tile_loadd(4, queries + d / 2, sizeof(Line));
    _tile_loadd(6, keys[0] + d, stride);
    _tile_loadd(7, keys[1] + d, stride);
    _tile_dpbf16ps(0, 6, 4);
    _tile_dpbf16ps(1, 7, 4);
  }
  _tile_stored(0, scores, sizeof(Line));
  _tile_stored(1, scores + kTileRows, sizeof(Line));
}

// 2^x for x <= 0, within 5 ulp: a polynomial in what rounding leaves of x, times a power. It is 0 below -125, where the processor
// would be slow. NaN stays NaN.
inline Lanes power_of_two(Lanes x) {
  const Lanes least = Lanes{} - 125.0f;
  const Lanes exponent = least > x ? least : x, whole = (exponent + 12582912.0f) - 12582912.0f; // the sum holds no fraction
  const Lanes rest = exponent - whole;
  Lanes y = Lanes{} + 1.340043312e-3f;
  y = y * rest + 9.676038065e-3f;
  y = y * rest + 5.550327212e-2f;
  y = y * rest + 2.402210734e-1f;
  y = y * rest + 6.931472067e-1f;
  y = y * rest + 1.0f;
  const Lanes power = _mm512_scalef_ps(y, whole);
  return x < least ? Lanes{} : power;
}

// Compute the weights of a tile of slots (online softmax: Milakov and Gimelshein, 2018); return the factor for earlier sums.
template <bool IsCapped, typename S>
inline Lanes weigh(const Head<S>& head, QueryTile* tile, const Tile& slots, const TileScales& scales, Line* scores, Line* weights) {
  const bool is_visible = slots.begin >= tile->fully_visible_from && slots.begin + slots.count <= tile->fully_visible_to;
  const int64_t tree_start = head.tree_start();
  const float log_scale = (IsCapped ? 1.0f : head.spec.scale) * kLog2E;
  Lanes largest[2] = {tile->largest, tile->largest};
  for (int64_t j = 0; j < kTile; ++j) {
    Lanes* score = lanes_of(scores + j);
    if constexpr (kIsQuantised<S>) *score *= scales.keys[j];
    if constexpr (IsCapped) cap_scores(scores[j].lanes, kLanes, head.spec.scale, head.spec.softcap);
    *score = j < slots.count ? *score * log_scale : Lanes{} + kMinusInfinity;
    if (!is_visible) *score = see(*tile, slots.begin + j, slots.begin + j - tree_start) ? *score : kMinusInfinity;
    largest[j % 2] = *score > largest[j % 2] ? *score : largest[j % 2]; // never NaN
  }
  const Lanes before = tile->largest;
  tile->largest = largest[0] > largest[1] ? largest[0] : largest[1];
  const Lanes base = tile->largest == kMinusInfinity ? Lanes{} : tile->largest;
  const Lanes kept = power_of_two(before - base);
  Lanes totals[2] = {};
  Words pairs[kSlotPairs];
  for (int j = 0; j < kSlotPairs; ++j) {
    Lanes even = power_of_two(*lanes_of(scores + 2 * j) - base), odd = power_of_two(*lanes_of(scores + 2 * j + 1) - base);
    totals[0] += even; // NaN if a score is
    totals[1] += odd;
    if constexpr (kIsQuantised<S>) even *= scales.values[2 * j], odd *= scales.values[2 * j + 1];
    const Words low = reinterpret<Words>(even) + 0x8000u, high = reinterpret<Words>(odd) + 0x8000u; // to nearest
    pairs[j] = low >> 16 | (high & 0xffff0000u);
  }
  tile->totals = tile->totals * kept + (totals[0] + totals[1]);
  transpose(pairs);
  std::memcpy(weights, pairs, sizeof pairs);
  return kept;
}

// Add a tile of slots to the weighted sums of values.
template <int D>
inline void add_values(int64_t head_dim, Lanes kept, const Line* weights, const Line* values, Line* sums) {
  const int64_t size = D ? D : head_dim;
  for (int i = 0; i < kTileRows; ++i) {
    if (kept[i] == 1.0f) continue;
    for (int64_t d = 0; d < size; d += kTileRows) *lanes_of(sums + d + i) *= kept[i];
  }
  _tile_loadd(4, weights, sizeof(Line));
  for (int64_t d = 0; d < size; d += kTileInputs) {
    _tile_loadd(0, sums + d, sizeof(Line));
    _tile_loadd(1, sums + d + kTileRows, sizeof(Line));
    _tile_loadd(6, values + d, sizeof(Line));
    _tile_loadd(7, values + d + kTileRows, sizeof(Line));
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_stored(0, sums + d, sizeof(Line));
    _tile_stored(1, sums + d + kTileRows, sizeof(Line));
  }
}

template <int D, typename S>
void attend_head_by_tiles(const Head<S>& head, const BFloat16* q, int64_t q_stride, BFloat16* output) {
  static thread_local TileRoom room;
  const int64_t head_dim = D ? D : head.spec.head_dim, value_dim = D ? D : head.spec.value_dim;
  const int64_t num_rows = head.item.num_rows, num_tiles = (num_rows + kTileRows - 1) / kTileRows;
  room.tiles.resize(num_tiles);
  room.queries.resize(num_tiles * head_dim / 2);
  room.sums.assign(num_tiles * value_dim, Line{});
  room.values.resize(value_dim);
  room.keys.resize(num_lines<BFloat16>(kTile * head_dim));
  int64_t first_slot = std::numeric_limits<int64_t>::max(), end = 0;
  for (int64_t i = 0; i < num_tiles; ++i) {
    const int64_t first_row = i * kTileRows, count = std::min<int64_t>(kTileRows, num_rows - first_row);
    load_queries(head, first_row, count, q, q_stride, &room.tiles[i], &room.queries[i * head_dim / 2]);
  }
  for (int64_t token = head.token(0); token <= head.token(num_rows - 1); ++token) {
    first_slot = std::min(first_slot, head.first_slot(token));
    end = std::max(end, head.end_slot(token));
  }
  configure_tiles(kRowsTogether);
  Tile next = find_tile(head, first_slot / kTile * kTile, end);
  while (next.count > 0) {
    const Tile tile = next;
    next = find_tile(head, tile.begin + kTile, end);
    load_values<D>(head, tile, next, room.values.data());
    TileScales scales;
    const BFloat16* keys[2];
    if constexpr (kIsQuantised<S>) {
      scales = find_scales(head, tile);
      BFloat16* copies = reinterpret_cast<BFloat16*>(room.keys.data());
      for (int64_t j = 0; j < kTile; ++j)
        for (int64_t d = 0; d < head_dim; d += kTileInputs)
          store(widen_pairs(head.keys + tile.offsets[j] + d, head.keys + tile.offsets[j] + d + kLanes), copies + j * head_dim + d);
      keys[0] = copies, keys[1] = copies + kTileRows * head_dim;
    } else {
      keys[0] = head.keys + tile.offsets[0], keys[1] = head.keys + tile.offsets[tile.count > kTileRows ? kTileRows : 0];
    }
    for (int64_t i = 0; i < num_tiles; ++i) {
      score_queries<D>(head_dim, keys, &room.queries[i * head_dim / 2], room.scores);
      const auto weigh_scores = [&](auto is_capped) __attribute__((always_inline)) {
        return weigh<is_capped>(head, &room.tiles[i], tile, scales, room.scores, room.weights);
      };
      const Lanes kept = head.spec.softcap > 0 ? weigh_scores(std::true_type{}) : weigh_scores(std::false_type{});
      add_values<D>(value_dim, kept, room.weights, room.values.data(), &room.sums[i * value_dim]);
    }
  }
  _tile_release();

  for (int64_t row = 0; row < num_rows; ++row) {
    const int64_t i = row / kTileRows, lane = row % kTileRows;
    BFloat16* result = output + (head.token(row) * head.spec.num_heads + head.query_head(row)) * value_dim;
    const float factor = 1.0f / room.tiles[i].totals[lane];
    for (int64_t d = 0; d < value_dim; d += kTileInputs) {
      const Line* sums = &room.sums[i * value_dim + d + lane];
      Lanes even = load_lanes(sums->lanes), odd = load_lanes(sums[kTileRows].lanes); // dimensions, or either half if quantised
      if constexpr (!kIsQuantised<S>) interleave(&even, &odd, LaneIndices{});
      narrow_lanes(even * factor, result + d);
      narrow_lanes(odd * factor, result + d + kLanes);
    }
  }
}

template <typename S>
inline void attend_by_tiles(const Head<S>& first_head, const BFloat16* q, int64_t q_stride, BFloat16* output) {
  const AttentionSpec& spec = first_head.spec;
  const int64_t dim = spec.value_dim == spec.head_dim ? spec.head_dim : 0; // of both keys and values
  const auto attend = dim == 64    ? attend_head_by_tiles<64, S>
                      : dim == 128 ? attend_head_by_tiles<128, S>
                                   : attend_head_by_tiles<0, S>;
  for (int64_t i = 0; i < first_head.item.num_heads; ++i) attend(first_head.at(i), q, q_stride, output);
}

// Whether dimensions are whole tiles, and tiles of keys lie within blocks.
inline bool takes_tiles(const AttentionSpec& spec, const KVLayer& kv) {
  return spec.head_dim % kTileInputs == 0 && spec.value_dim % kTileInputs == 0 && kv.block_size % kTileRows == 0;
}

#endif

} // namespace
