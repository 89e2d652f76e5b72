// Sampling: random numbers, samples, and the verification of trees.

#pragma once

#include "distribution.h"

namespace {

// purposes of random numbers
constexpr int64_t kSample = TITAN_SAMPLE, kDraft = TITAN_DRAFT, kAccept = TITAN_ACCEPT, kResidual = TITAN_RESIDUAL;

// Uniform in (0, 1) by Philox 4x32-10; key = seed, counter = (position, stream, 0, 0).
inline double uniform_number(uint64_t seed, int64_t position, int64_t stream) {
  uint32_t c0 = static_cast<uint32_t>(position), c1 = static_cast<uint32_t>(stream), c2 = 0, c3 = 0;
  uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = static_cast<uint64_t>(c0) * 0xD2511F53u, product1 = static_cast<uint64_t>(c2) * 0xCD9E8D57u;
    c0 = static_cast<uint32_t>(product1 >> 32) ^ c1 ^ key0;
    c1 = static_cast<uint32_t>(product1);
    c2 = static_cast<uint32_t>(product0 >> 32) ^ c3 ^ key1;
    c3 = static_cast<uint32_t>(product0);
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  const uint64_t bits = static_cast<uint64_t>(c0) << 20 | c1 >> 12;
  return (static_cast<double>(bits) + 0.5) * 0x1p-52; // half a step, so that it is never 0 or 1
}

// Return the first entry at which the running sum exceeds `uniform` times the total; 0 if no entry is above 0.
int64_t draw_row(const float* probs, double uniform, int64_t size) {
  const auto sum_chunk = [=](int64_t start) {
    const int64_t end = std::min(start + kChunk, size);
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = start; i < end; ++i) sum += static_cast<double>(probs[i]);
    return sum;
  };
  double total = 0, before = 0, inside = 0; // of all, before the chunk of that entry, and inside of it
  for (int64_t start = 0; start < size; start += kChunk) total += sum_chunk(start);
  const double height = std::min(uniform * total, std::nextafter(total, 0.0));
  int64_t i = 0, last = 0; // the last entry above 0, in case rounding leaves the sum short
  for (double sum; i < size; i += kChunk, before = sum)
    if ((sum = before + sum_chunk(i)) > height) break;
  for (const int64_t end = std::min(i + kChunk, size); i < end; ++i) {
    inside += static_cast<double>(probs[i]);
    if (probs[i] > 0) last = i;
    if (before + inside > height) return i;
  }
  return last;
}

// Sample a token per child without replacement; -1 where no token is left.
void draw_siblings(const float* probs, uint64_t seed, int64_t position, int64_t num_children, int64_t* tokens, int64_t size) {
  std::unique_ptr<float[]> left; // the probabilities without the tokens sampled before, once there are any
  for (int64_t rank = 0; rank < num_children; ++rank) {
    const float* row = left ? left.get() : probs;
    const int64_t token = draw_row(row, uniform_number(seed, position, kDraft | rank << 8), size);
    tokens[rank] = row[token] > 0 ? token : -1;
    if (rank + 1 == num_children) return;
    if (!left) {
      left.reset(new float[size]);
      std::copy_n(probs, size, left.get());
    }
    left[token] = 0;
  }
}

// Compute max(p - s q, 0); return its sum. Where little of q is left, s may be larger than any float.
double residual_row(const float* probs, const float* draft_probs, double scale, float* rest, int64_t size) {
  return sum_terms(size, [=](int64_t i) {
    return rest[i] = std::max(probs[i] - static_cast<float>(std::min(scale * draft_probs[i], 1.0)), 0.0f);
  });
}

// Trees of a plan, see `DraftTrees` of `titan/core/trees.py`, of which some are verified. Each of these has rows of logits: that
// of its root, then those of its nodes.
struct VerifiedTrees {
  int64_t num_trees;
  int64_t max_depth;         // of `paths`
  const int64_t* rows;       // [trees], of the plan
  const int64_t* start_loc;  // [all rows of the plan + 1], of the nodes
  const char* is_sampled;    // [all rows of the plan]
  const Options* options;    // [trees], at the positions of the tokens that follow the roots
  const int64_t* token_ids;  // [nodes]
  const int32_t* parents;    // [nodes], -1 for the root, counted from the tree's first; children come after their parents
  const float* draft_probs;  // [any, size]
  const int32_t* draft_rows; // [rows of the plan + nodes], which of them the children of each root and node were sampled from
  // outputs
  int32_t* paths;        // [trees, max_depth], accepted nodes from the root down, -1 after them
  int64_t* final_tokens; // [trees], -1 where none can be sampled
};

// A tree of these, and the path down to where its verification is.
struct Descent {
  const int64_t* token_ids; // of its nodes
  const int32_t* parents;
  const Options& options;
  int32_t* path;
  int64_t num_nodes, root_row;     // entry of the root in `draft_rows`, before those of the nodes
  int64_t depth = 0, reached = -1; // the node where the path ends, or the root, -1

  Descent(const VerifiedTrees& trees, int64_t i)
      : options(trees.options[i]), path(trees.paths + i * trees.max_depth) {
    const int64_t row = trees.rows[i], first = trees.start_loc[row];
    token_ids = trees.token_ids + first, parents = trees.parents + first;
    num_nodes = trees.start_loc[row + 1] - first, root_row = first + row;
    std::fill_n(path, trees.max_depth, -1);
  }

  void enter(int64_t node) { reached = node, path[depth++] = static_cast<int32_t>(node); }
  bool is_leaf() const { return std::find(parents + reached + 1, parents + num_nodes, reached) == parents + num_nodes; }
  double uniform(int64_t stream) const { return uniform_number(options.seed, options.position + depth, stream); }

  // The token drawn from probabilities where the path ends; -1 if none has any.
  int64_t draw(const float* probs, int64_t stream, int64_t size) const {
    const int64_t token = draw_row(probs, uniform(stream), size);
    return probs[token] > 0 ? token : -1;
  }
};

// Verify a tree by sample-and-match, see `titan/kernels/torch/trees.py`, given the logits at its root and nodes: descend, as long as
// there is one, to the child that is the target's token. Return that token at the end of the path.
template <typename T>
int64_t match_tree(const VerifiedTrees& trees, int64_t i, const T* logits, int64_t size) {
  Descent descent(trees, i);
  const bool is_greedy = descent.options.temperature == 0;
  const std::unique_ptr<float[]> probs(is_greedy ? nullptr : new float[size]);
  const auto target_token = [&] {
    const T* here = logits + (1 + descent.reached) * size;
    if (is_greedy) return argmax_row(here, size);
    distribution_row(here, descent.options, probs.get(), size);
    return descent.draw(probs.get(), kSample, size);
  };
  int64_t wanted = target_token();
  for (int64_t node = 0; node < descent.num_nodes; ++node) {
    if (descent.parents[node] != descent.reached || descent.token_ids[node] != wanted) continue;
    descent.enter(node);
    wanted = target_token();
  }
  return wanted;
}

// Verify a sampled tree by recursive rejection, likewise: descend to the first child that is accepted. Return a token from the
// residual; from p at a leaf, or if rounding leaves nothing of the residual.
template <typename T>
int64_t reject_tree(const VerifiedTrees& trees, int64_t i, const T* logits, int64_t size) {
  Descent descent(trees, i);
  const std::unique_ptr<float[]> room(new float[3 * size]);
  float *probs = room.get(), *rest = probs + size, *untried = rest + size; // p where the path ends
  const float* draft_probs; // q that its children were sampled from, null at a leaf
  double scale;             // s of the children tried so far
  int64_t rank, rejected = -1; // how many these are, and the last of them
  const auto arrive = [&] {
    distribution_row(logits + (1 + descent.reached) * size, descent.options, probs, size);
    draft_probs = descent.is_leaf() ? nullptr : trees.draft_probs + trees.draft_rows[descent.root_row + 1 + descent.reached] * size;
    scale = 0, rank = 0;
  };
  const auto accepts = [&](int64_t token) {
    if (token < 0 || token >= size) return false; // whoever proposed it
    const double p = probs[token], q = draft_probs[token];
    double mass = 1, left = 1; // of r and q_k before they are normalised
    if (rank > 0) { // 1 less what was tried would lose what is left of a q that is nearly sure of a token
      if (rank == 1) std::copy_n(draft_probs, size, untried);
      untried[rejected] = 0;
      left = sum_terms(size, [=](int64_t i) { return untried[i]; });
      mass = residual_row(probs, draft_probs, scale, rest, size);
    }
    const double coin = descent.uniform(kAccept | rank << 8);
    if (coin * mass * q < std::max(p - scale * q, 0.0) * left) return true;
    if (left > 0) scale += mass / left; // else nothing of q is left to subtract
    rejected = token, rank += 1;
    return false;
  };
  arrive();
  for (int64_t node = 0; node < descent.num_nodes; ++node) {
    if (descent.parents[node] != descent.reached || !accepts(descent.token_ids[node])) continue;
    descent.enter(node);
    arrive();
  }
  if (!draft_probs) return descent.draw(probs, kSample, size);
  const bool is_rest = residual_row(probs, draft_probs, scale, rest, size) > 0;
  return descent.draw(is_rest ? rest : probs, kResidual, size);
}

template <typename T>
void verify_trees(Team* team, const T* logits, int64_t size, const VerifiedTrees& trees) {
  std::vector<int64_t> root_rows(trees.num_trees + 1, 0);
  for (int64_t i = 0; i < trees.num_trees; ++i)
    root_rows[i + 1] = root_rows[i] + 1 + trees.start_loc[trees.rows[i] + 1] - trees.start_loc[trees.rows[i]];
  share(team, trees.num_trees, root_rows[trees.num_trees] / std::max<int64_t>(trees.num_trees, 1) * size,
        [&](int64_t i) {
          const auto verify = trees.is_sampled[trees.rows[i]] ? reject_tree<T> : match_tree<T>;
          trees.final_tokens[i] = verify(trees, i, logits + root_rows[i] * size, size);
        });
}

// Sample children from each row i of the probabilities, and write them to row places[i] of a table.
inline void sample_children(Team* team, const Options* options, const float* probs, const int64_t* num_children, const int64_t* places,
                          int64_t* tokens, int64_t num_rows, int64_t size, int64_t max_children) {
  share(team, num_rows, size, [&](int64_t row) {
    int64_t* children = tokens + places[row] * max_children;
    draw_siblings(probs + row * size, options[row].seed, options[row].position, num_children[row], children, size);
  });
}

} // namespace
