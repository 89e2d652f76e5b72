// Ragged tree attention over paged KV.
//
// Keys and values are read in place, tile by tile, and used for all rows that share them. Tiles begin at multiples of their size, and
// a hidden slot adds zero: the sums of a row do not depend on the other rows. Quantised slots are multiplied as integers: by queries
// and by weights that are rounded to 16 bits, each row's by itself; the scales of keys multiply scores, and those of values the weights.

#pragma once

#include "amx_attention.h"

namespace {

constexpr int64_t kItemQueries = 64;         // most queries of a request that one thread attends at a time; most rows, if of several heads
constexpr int64_t kItemNumbers = 128 * 1024; // most numbers of the sums of a head's rows, which stay in the L2 cache

// The types that queries, keys and weights, and values, are multiplied in.
template <typename T, typename S>
using Factor = std::conditional_t<kIsQuantised<S>, int16_t, Row<T>>;
template <typename T, typename S>
using Value = std::conditional_t<kIsQuantised<S>, int16_t, T>;

// Working memory of a thread. Dimensions of keys are padded to P, a multiple of kPairInputs, and those of values to V.
struct AttentionRoom {
  std::vector<Line> queries;  // Factor [heads, rows, P]
  std::vector<float> units;   // [heads, rows], what 1 stands for in quantised queries
  std::vector<Line> keys;     // Factor [kTile, P], if they cannot be used in place
  std::vector<Line> values;   // Value [kTile, V], if they cannot be used in place; numbers of 16 bits as pairs of slots [kTile / 2, V, 2]
  std::vector<Line> sums;     // float [heads, rows, V], weighted sums of values, in their order
  std::vector<float> largest; // [heads, rows], largest score, and kLanes numbers more
  std::vector<float> totals;  // [heads, rows], sums of weights
  std::vector<RowSlots> seen; // [rows]
};

// Dimensions that are kLanes words.
template <typename T>
constexpr int64_t kStep = kLanes * kPair<T>;

template <typename T>
inline T* numbers_of(std::vector<Line>& lines) {
  return reinterpret_cast<T*>(lines.data());
}

// Find the rows of a tile; copy them to `copies`, padded with zeros, unless they can be used in place. Of quantised rows, what
// follows in memory is copied as padding.
template <typename T, typename Copy>
void find_rows(const T* numbers, const Tile& tile, int64_t head_dim, int64_t padded_dim, Copy* copies, const Copy** rows) {
  if constexpr (std::is_same_v<T, Copy>) {
    if (padded_dim == head_dim) {
      for (int64_t j = 0; j < kTile; ++j) rows[j] = numbers + tile.offsets[j];
      return;
    }
  }
  for (int64_t j = 0; j < kTile; ++j) {
    const T* row = numbers + tile.offsets[j];
    Copy* copy = copies + j * padded_dim;
    if constexpr (kIsQuantised<T>) {
      for (int64_t d = 0; d < padded_dim; d += kStep<Copy>) store(load_pairs(row + d), copy + d);
    } else {
      for (int64_t d = 0; d < head_dim; ++d) narrow(widen(row[d]), &copy[d]);
      std::fill(copy + head_dim, copy + padded_dim, Copy{});
    }
    rows[j] = copy;
  }
}

// Make pairs of slots of values, even dimensions before odd ones in each kStep; an odd slot at the end is paired with zeros.
template <typename S, typename Y>
void pair_values(const S* const* rows, int64_t count, int64_t dim, Y* pairs, const Y** paired) {
  for (int64_t j = 0; j < count; j += 2, pairs += 2 * dim) {
    const Words mask = Words{} - (j + 1 < count ? 1u : 0u);
    for (int64_t d = 0; d < dim; d += kStep<Y>) {
      const Words first = load_pairs(rows[j] + d), second = load_pairs(rows[j + 1] + d) & mask;
      store((first & 0xffffu) | second << 16, pairs + 2 * d);
      store(first >> 16 | (second & 0xffff0000u), pairs + 2 * d + kStep<Y>);
    }
    paired[j] = pairs;
  }
}

// Compute the scores of rows with kLanes keys; D is their number of dimensions, or 0: any.
template <int D, typename X>
void score(const X* queries, int num_rows, const X* const* keys, int64_t any_dim, const float* row_scales, float* scores) {
  const int64_t dim = D ? D : any_dim;
  for (int row = 0; row < num_rows; ++row, queries += dim) {
    Sums<X> products[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
      const X* key = keys[i];
      products[i] = Sums<X>{};
#pragma GCC unroll 8
      for (int64_t d = 0; d < dim; d += kStep<X>) products[i] = add_product(products[i], queries + d, key + d);
    }
    store(__builtin_convertvector(reduce(products, std::plus<>()), Lanes) * row_scales[row], scores + row * kTile);
  }
}

// Turn the scores of M rows into weights, relative to each row's largest score so far (online softmax: Milakov and Gimelshein, 2018),
// and compute the factors for earlier sums. Sums run over whole tiles, so that their order does not depend on where the context ends.
// All rows go through each stage before the next one: stages of a row alone wait for each other. Of `largest`, kLanes numbers are read.
template <int M>
inline void weigh(float (*scores)[kTile], float* largest, float* totals, float* kept) {
  if constexpr (M > kLanes) {
    weigh<kLanes>(scores, largest, totals, kept);
    return weigh<M - kLanes>(scores + kLanes, largest + kLanes, totals + kLanes, kept + kLanes);
  } else {
    Lanes most[M], sums[M] = {};
    for (int row = 0; row < M; ++row) {
      most[row] = Lanes{} + largest[row];
      for (int64_t j = 0; j < kTile; j += kLanes) {
        const Lanes x = load_lanes(scores[row] + j);
        most[row] = x > most[row] ? x : most[row]; // never NaN
      }
    }
    const Lanes new_largest = reduce(most, [](Lanes a, Lanes b) { return a > b ? a : b; });
    const Lanes base = new_largest == kMinusInfinity ? Lanes{} : new_largest;
    const Lanes change = load_lanes(largest) - base; // above 0 in lanes of other rows alone
    Line bases, factors;
    store(base, bases.lanes);
    store(change > 0.0f ? Lanes{} : change, factors.lanes);
#pragma omp simd
    for (int row = 0; row < kLanes; ++row) factors.lanes[row] = exponential(factors.lanes[row]);
    for (int row = 0; row < M; ++row) {
#pragma omp simd
      for (int64_t j = 0; j < kTile; ++j) scores[row][j] = exponential(scores[row][j] - bases.lanes[row]);
      for (int64_t j = 0; j < kTile; j += kLanes) sums[row] += load_lanes(scores[row] + j);
    }
    const Lanes sum = reduce(sums, std::plus<>()); // NaN if a score is
    for (int row = 0; row < M; ++row) {
      largest[row] = new_largest[row];
      kept[row] = factors.lanes[row];
      totals[row] = totals[row] * kept[row] + sum[row];
    }
  }
}

constexpr int kMostSums = kLanes == 8 ? 8 : 24; // vectors of sums that stay in registers, beside values

// Dimensions of values whose sums for M rows fit into the registers, and enough of them that no sum waits for the one before it.
constexpr int kFewDims = kLanes == 16 ? 32 : 16;
template <int M>
constexpr int kMostDims = M * 64 / kLanes <= kMostSums ? 64 : M * 32 / kLanes <= kMostSums ? 32 : kFewDims;

constexpr int64_t kHeadsAhead = 2; // the one whose slots are read ahead, counted from the one that attends to a tile; then those of the next tile

// What to read ahead while a tile is attended to: slots of the same one, or of the next.
template <typename S>
struct Ahead {
  const S* keys;
  const S* values;
  const int64_t* offsets;
  int64_t count;
  int64_t key_size;
  int64_t value_size;
};

// Attend M rows of a KV head, from `first` on, to a tile of slots; `scales` are of quantised ones, `place` is the first row's in the room.
// What is read ahead is spread over the work: memory would rest meanwhile, and all at once is more than it takes.
template <int M, typename S, typename X, typename Y>
void attend_rows(const Head<S>& head, const Tile& tile, const X* const* keys, const Y* const* values, const TileScales* scales,
                 int64_t dim, int64_t value_dim, int64_t first, int64_t place, const Ahead<S>& ahead, AttentionRoom* room) {
  const auto compute_scores = dim == 64 ? score<64, X> : dim == 128 ? score<128, X> : score<0, X>;
  const X* queries = numbers_of<X>(room->queries) + place * dim;
  alignas(64) float scores[M][kTile];
  alignas(64) X weights[M][kTile];
  float row_scales[M], kept[M], units[M];
  for (int row = 0; row < M; ++row) row_scales[row] = kIsQuantised<S> ? head.spec.scale * room->units[place + row] : head.spec.scale;
  for (int j = 0; j < kTile; j += kLanes) {
    const int64_t end = std::min<int64_t>(j + kLanes, ahead.count);
    for (int64_t i = j; i < end; ++i) prefetch_numbers(ahead.keys + ahead.offsets[i], ahead.key_size);
    compute_scores(queries, M, keys + j, dim, row_scales, &scores[0][j]);
  }
  for (int row = 0; row < M; ++row) {
    if constexpr (kIsQuantised<S>) multiply(scores[row], scales->keys);
    if (head.spec.softcap > 0) cap_scores(scores[row], kTile, 1.0f, head.spec.softcap);
    hide(head, first + row, room->seen[first + row], tile, scores[row]);
  }
  weigh<M>(scores, &room->largest[place], &room->totals[place], kept);
  for (int row = 0; row < M; ++row) {
    if constexpr (kIsQuantised<S>) {
      multiply(scores[row], scales->values);
      units[row] = round_to_integers(scores[row], kTile, kLargestWeight, weights[row]);
    } else {
      for (int64_t j = 0; j < kTile; j += kLanes) narrow_lanes(load_lanes(scores[row] + j), &weights[row][j]);
    }
  }
  const auto add = [&](auto vectors, int64_t d) {
    constexpr int V = vectors;
    float* result = numbers_of<float>(room->sums) + place * value_dim + d;
    Sums<Y> sums[V][M] = {};
    if constexpr (!kIsQuantised<S>)
#pragma GCC unroll 16
      for (int v = 0; v < V; ++v)
#pragma GCC unroll 8
        for (int row = 0; row < M; ++row) sums[v][row] = load_lanes(result + row * value_dim + v * kLanes) * kept[row];
    const int64_t num_ahead = d == 0 ? ahead.count : 0;
    for (int64_t j = 0; j < tile.count; j += kPair<Y>) {
      const Y* packed[V];
      for (int v = 0; v < V; ++v) packed[v] = values[j] + (d + v * kLanes) * kPair<Y>;
      add_products<M, V>(&weights[0][j], kTile, packed, sums);
      for (int64_t i = j; i < std::min(j + kPair<Y>, num_ahead); ++i) prefetch_numbers(ahead.values + ahead.offsets[i], ahead.value_size);
    }
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v)
#pragma GCC unroll 8
      for (int row = 0; row < M; ++row) {
        float* sum = result + row * value_dim + v * kLanes;
        if constexpr (kIsQuantised<S>)
          store(load_lanes(sum) * kept[row] + __builtin_convertvector(sums[v][row], Lanes) * units[row], sum);
        else
          store(sums[v][row], sum);
      }
  };
  int64_t d = 0;
  for (; d + kMostDims<M> <= value_dim; d += kMostDims<M>) add(std::integral_constant<int, kMostDims<M> / kLanes>{}, d);
  for (; d < value_dim; d += kFewDims) add(std::integral_constant<int, kFewDims / kLanes>{}, d);
  for (int64_t j = tile.count; j < ahead.count; ++j) prefetch_numbers(ahead.values + ahead.offsets[j], ahead.value_size);
}

// Write a row of results from its sums: those of pairs are in the order of `pair_values`, others in their own.
template <typename Y, typename T>
inline void write_result(float* sums, float factor, int64_t value_dim, T* result) {
  if constexpr (kPair<Y> == 2) {
    for (float* pairs = sums; pairs < sums + value_dim; pairs += kStep<Y>) {
      Lanes even = load_lanes(pairs), odd = load_lanes(pairs + kLanes);
      interleave(&even, &odd, LaneIndices{});
      store(even, pairs), store(odd, pairs + kLanes);
    }
  }
#pragma omp simd
  for (int64_t d = 0; d < value_dim; ++d) narrow(sums[d] * factor, &result[d]);
}

// Attend to each tile from all heads of an item in turn: in the cache, a block's heads lie side by side.
template <typename T, typename S>
void attend_by_vectors(const Head<S>& first_head, const T* q, int64_t q_stride, T* output) {
  using X = Factor<T, S>;
  using Y = Value<T, S>;
  static thread_local AttentionRoom room;
  const AttentionSpec& spec = first_head.spec;
  const int64_t num_rows = first_head.item.num_rows, num_heads = first_head.item.num_heads, num_places = num_heads * num_rows;
  const int64_t head_dim = spec.head_dim, dim = round_up(head_dim, kPairInputs);
  const int64_t value_dim = spec.value_dim, sums_dim = round_up(value_dim, kPairInputs);
  room.queries.assign(num_lines<X>(num_places * dim), Line{});
  room.units.resize(num_places);
  room.sums.assign(num_lines<float>(num_places * sums_dim), Line{});
  room.keys.resize(num_lines<float>(kTile * dim));
  room.values.resize(num_lines<float>(2 * kTile * sums_dim));
  room.largest.assign(num_places + kLanes, kMinusInfinity);
  room.totals.assign(num_places, spec.sinks ? 1.0f : 0.0f);
  room.seen.resize(num_rows);
  const auto for_places = [&](const auto& work) { // with the place in the room, the token and the query head
    for (int64_t i = 0; i < num_heads; ++i)
      for (int64_t row = 0; row < num_rows; ++row)
        work(i * num_rows + row, first_head.token(row), first_head.at(i).query_head(row));
  };
  int64_t first_slot = std::numeric_limits<int64_t>::max(), end = 0;
  for (int64_t row = 0; row < num_rows; ++row) {
    const int64_t token = first_head.token(row);
    const RowSlots& seen = room.seen[row] = {first_head.first_slot(token), first_head.plan.visible_lens[token], first_head.end_slot(token)};
    first_slot = std::min(first_slot, seen.first), end = std::max(end, seen.end);
  }
  for_places([&](int64_t place, int64_t token, int64_t query_head) {
    if (spec.sinks) room.largest[place] = spec.sinks[query_head];
    const T* query = q + token * q_stride + query_head * head_dim;
    X* copy = numbers_of<X>(room.queries) + place * dim;
    if constexpr (kIsQuantised<S>)
      room.units[place] = round_to_integers(query, head_dim, largest_query(dim), copy);
    else
      for (int64_t d = 0; d < head_dim; ++d) narrow(widen(query[d]), &copy[d]);
  });
  const int64_t num_groups = (num_rows + kMostRows - 1) / kMostRows, group_rows = (num_rows + num_groups - 1) / num_groups;
  Tile next = find_tile(first_head, first_slot / kTile * kTile, end);
  while (next.count > 0) {
    const Tile tile = next;
    next = find_tile(first_head, tile.begin + kTile, end);
    for (int64_t i = 0; i < num_heads; ++i) {
      const Head<S> head = first_head.at(i);
      const int64_t i_ahead = i + kHeadsAhead < num_heads ? i + kHeadsAhead : std::min(i + kHeadsAhead - num_heads, num_heads - 1);
      const Head<S> head_ahead = first_head.at(i_ahead);
      const Tile& tile_ahead = i_ahead > i ? tile : next;
      Ahead<S> ahead{head_ahead.keys, head_ahead.values, tile_ahead.offsets, tile_ahead.count, head_dim, spec.is_latent ? 0 : value_dim};
      const X* keys[kTile];
      const Y* values[kTile];
      TileScales scales;
      find_rows(head.keys, tile, head_dim, dim, numbers_of<X>(room.keys), keys);
      if constexpr (kIsQuantised<S>) {
        scales = find_scales(head, tile);
        const S* slots[kTile];
        for (int64_t j = 0; j < kTile; ++j) slots[j] = head.values + tile.offsets[j];
        pair_values(slots, tile.count, sums_dim, numbers_of<Y>(room.values), values);
      } else {
        find_rows(head.values, tile, value_dim, sums_dim, numbers_of<Y>(room.values) + kTile * sums_dim, values);
        if constexpr (kPair<Y> == 2) pair_values(values, tile.count, sums_dim, numbers_of<Y>(room.values), values);
      }
      for (int64_t first = 0; first < num_rows; first += group_rows) {
        const int64_t count = std::min(group_rows, num_rows - first);
        if (std::none_of(&room.seen[first], &room.seen[first] + count, [&](const RowSlots& each) { return each.end > tile.begin; }))
          continue;
        with_constant<kMostRows>(count, [&](auto m) {
          attend_rows<m>(head, tile, keys, values, &scales, dim, sums_dim, first, i * num_rows + first, ahead, &room);
        });
        ahead.count = 0; // it has been read
      }
    }
  }
  for_places([&](int64_t place, int64_t token, int64_t query_head) {
    T* result = output + (token * spec.num_heads + query_head) * value_dim;
    write_result<Y>(numbers_of<float>(room.sums) + place * sums_dim, 1.0f / room.totals[place], value_dim, result);
  });
}

// Divide the requests of a plan among threads: their KV heads, so that there are items enough for threads to balance, and where there
// are at most half as many of these as threads, their rows as well, kMostRows or more each.
inline std::vector<AttentionItem> attention_items(const AttentionPlan& plan, const AttentionSpec& spec, int64_t num_threads) {
  std::vector<AttentionItem> items;
  const int64_t* starts = plan.query_start_loc;
  int64_t num_queried = 0; // requests
  for (int64_t request = 0; request < plan.num_requests; ++request) num_queried += starts[request] < starts[request + 1];
  const int64_t num_all_heads = num_queried * spec.num_kv_heads, num_items = num_threads * kChunksPerThread;
  const int64_t num_parts = std::max<int64_t>(num_threads / std::max<int64_t>(num_all_heads, 1), 1); // of the rows of each
  const int64_t group = spec.num_heads / spec.num_kv_heads;
  const int64_t most_rows = std::min(kItemQueries * group, std::max<int64_t>(kItemNumbers / spec.value_dim, kMostRows));
  const int64_t most_heads = std::min((num_all_heads + num_items - 1) / num_items, spec.num_kv_heads);
  for (int64_t request = 0; request < plan.num_requests; ++request) {
    const int64_t num_rows = (starts[request + 1] - starts[request]) * group;
    const int64_t size = std::min(most_rows, std::max<int64_t>((num_rows + num_parts - 1) / num_parts, kMostRows));
    for (int64_t first = 0; first < num_rows; first += size) {
      const int64_t count = std::min(size, num_rows - first), num_heads = std::clamp<int64_t>(kItemQueries / count, 1, most_heads);
      for (int64_t head = 0; head < spec.num_kv_heads; head += num_heads)
        items.push_back({request, first, count, head, std::min(num_heads, spec.num_kv_heads - head)});
    }
  }
  return items;
}

template <typename T>
void tree_attention(Member& member, const AttentionPlan& plan, const AttentionSpec& spec, const std::vector<AttentionItem>& items,
                    const T* q, int64_t q_stride, const KVLayer& kv, T* output) {
  int64_t num_scores = 0;
  for (const AttentionItem& item : items) num_scores += plan.seq_lens[item.request] * item.num_heads * item.num_rows;
  const int64_t num_items = items.size(), size = num_scores / std::max<int64_t>(num_items, 1) * spec.head_dim;
  member.share(num_items, size, [&](int64_t index) {
    with_stored<T>(kv, [&]<typename S>(S) {
      const Head<S> head{plan, spec, items[index], kv};
#ifdef TITAN_HAS_AMX
      if constexpr (std::is_same_v<T, BFloat16>)
        if (takes_tiles(spec, kv)) return attend_by_tiles(head, q, q_stride, output);
#endif
      attend_by_vectors(head, q, q_stride, output);
    });
  });
}

// For all requests of a plan, on the threads.
template <typename T>
void run_attention(Team* team, const AttentionPlan& plan, const AttentionSpec& spec, const T* q, int64_t q_stride, const KVLayer& kv,
                   T* output) {
  const std::vector<AttentionItem> items = attention_items(plan, spec, team->num_threads());
  team->run([&](Member& member) { tree_attention(member, plan, spec, items, q, q_stride, kv, output); });
}

} // namespace
