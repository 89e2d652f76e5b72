// Growth of draft trees: the passes over all their depths, and the choices between them, in one call.

#pragma once

#include <chrono>

#include "decoder.h"
#include "sampling.h"

namespace {

// The nodes of draft trees, see `DraftTrees` of `titan/core/trees.py`.
struct NodeColumns {
  int64_t* token_ids;
  int32_t* parents;
  int64_t* depths;
  int64_t* ancestor_bits;
  float* scores;
  int32_t* draft_slots;
};

// What the nodes of a beam are worth, see `Worth` of `titan/core/growth.py`. A tree that grows to its end, whatever that costs, has
// a node price of -inf: all its profits are infinite.
struct Worth {
  float agreement;
  float acceptance;
  float node_price;
  float row_price;
  float pass_price;
};

// How the tree of one request grows: it fills a shape, or a beam expands the best nodes of each depth. Of a request without a tree,
// whose max_nodes is 0, tokens are fed, and nothing else.
struct TreeGrowth {
  const int32_t* parents; // [max_nodes], those of a shape's nodes, -1 for the root; null: a beam, or no tree
  int64_t root;           // position of the root
  int64_t depth;          // of a beam's deepest nodes
  int64_t width;          // nodes that a beam expands at each depth
  int64_t num_children;   // tokens that a beam considers after each
  int64_t max_nodes;      // of the tree
  int64_t row;            // of the plan
  int64_t first_probs;    // the root's row of `probs`; those of nodes are by their slots behind it
  Options options;        // at the position after the root; of a beam, the temperature of the probabilities that it compares
  int64_t is_sampled;     // whether the nodes of a shape are sampled
  Worth worth;
};

// The trees of n requests, R rows of the plan, and where their draft's KV is.
struct Growing {
  int64_t num_requests;
  int64_t table_width;
  int64_t target_vocab_size; // of the trees: tokens from there on are not proposed
  const TreeGrowth* growths;  // [n], rows of the plan ascending
  const int64_t* block_table; // [n, table_width]
  const int64_t* fed_tokens;  // committed ones that the draft lacks, of all requests
  const int64_t* num_fed;     // [n], at least 1; the last of a request's is its root
  // outputs
  NodeColumns nodes;    // of all trees, one after another
  int32_t* draft_rows;  // rows of `probs`, of roots and nodes; null if nothing is sampled
  int64_t* counts;      // [R], nodes of each tree
  bool* is_chain;       // [R], whether each node is a child of the one before it; others are not written
  float* probs;         // [roots and slots of sampled shapes, target_vocab_size]
  float* first_scores;  // [R], log-probability of the first child of a beam's root; others are not written
  int64_t num_passes;
  int64_t num_rows;     // of all passes together
  double pass_seconds;  // time of all passes together
};

// A node that may become part of a tree, or the root. Slots are where nodes are fed, counted from the one after the root.
struct Candidate {
  int64_t token;
  float score;
  int32_t parent_slot;
  int32_t slot; // -1 if it is not fed, and of the root
  int64_t bits; // the slots of its ancestors, and its own
};

// Return the `count` best candidates from `begin` on, or as many as are finite: greater scores first, of equal ones the earlier first.
inline std::vector<const Candidate*> best_candidates(const std::vector<Candidate>& candidates, size_t begin, int64_t count) {
  std::vector<const Candidate*> best;
  best.reserve(candidates.size() - begin);
  for (size_t i = begin; i < candidates.size(); ++i)
    if (std::isfinite(candidates[i].score)) best.push_back(&candidates[i]);
  count = std::min<int64_t>(count, best.size());
  std::partial_sort(best.begin(), best.begin() + count, best.end(),
                    [](const Candidate* a, const Candidate* b) { return a->score != b->score ? a->score > b->score : a < b; });
  best.resize(count);
  return best;
}

// A candidate that is fed, so that its children can be chosen.
struct Fed {
  int64_t request;
  int64_t index; // among the request's candidates
};

// Tokens of all requests that are fed together.
struct Rows {
  std::vector<int64_t> token_ids, positions, slots, bits, visible_lens, kept; // `kept`: those that have logits
  std::vector<int64_t> start_loc, seq_lens, tree_starts;                      // of the requests; of `start_loc`, counts until it is summed

  explicit Rows(int64_t num_requests) : start_loc(num_requests + 1, 0), seq_lens(num_requests, 0), tree_starts(num_requests) {}

  void clear() {
    for (auto* each : {&token_ids, &positions, &slots, &bits, &visible_lens, &kept}) each->clear();
    std::fill(start_loc.begin(), start_loc.end(), 0);
  }

  int64_t size() const { return static_cast<int64_t>(token_ids.size()); }
};

template <typename T>
class TreeGrower {
public:
  TreeGrower(const Decoder& decoder, Growing& growing)
      : decoder_(decoder), growing_(growing), rows_(growing.num_requests), candidates_(growing.num_requests),
        vocab_size_(std::min(decoder.head.num_outputs, growing.target_vocab_size)) {}

  void run() {
    feed_roots();
    take(0);
    for (int64_t depth = 1; feed(depth); ++depth) take(depth);
    for (int64_t i = 0; i < growing_.num_requests; ++i) finish(i);
  }

private:
  void add_row(int64_t request, int64_t token, int64_t position, int64_t slot, int64_t bits) {
    const int64_t block_size = decoder_.layers[0].kv.block_size; // and of all others
    const int64_t block = growing_.block_table[request * growing_.table_width + slot / block_size];
    rows_.token_ids.push_back(token);
    rows_.positions.push_back(position);
    rows_.slots.push_back(block * block_size + slot % block_size);
    rows_.visible_lens.push_back(std::min(position, growing_.growths[request].root) + 1);
    rows_.bits.push_back(bits);
    rows_.start_loc[request + 1] += 1;
    rows_.seq_lens[request] = std::max(rows_.seq_lens[request], slot + 1); // nodes come in the order of their parents
  }

  void forward_rows() {
    std::partial_sum(rows_.start_loc.begin(), rows_.start_loc.end(), rows_.start_loc.begin());
    const AttentionPlan plan{growing_.num_requests, growing_.table_width, rows_.start_loc.data(), rows_.seq_lens.data(),
                             rows_.tree_starts.data(), growing_.block_table, rows_.positions.data(), rows_.visible_lens.data(),
                             rows_.bits.data()};
    const int64_t num_kept = rows_.kept.size();
    logits_ = memory_.room_for<T>(num_kept * decoder_.head.num_outputs);
    const auto start = std::chrono::steady_clock::now();
    forward(decoder_, plan, rows_.token_ids.data(), rows_.slots.data(), rows_.kept.data(), num_kept, logits_);
    growing_.pass_seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    growing_.num_passes += 1;
    growing_.num_rows += rows_.size();
  }

  Candidate& candidate(const Fed& node) { return candidates_[node.request][node.index]; }

  // Feed the committed tokens that the draft lacks.
  void feed_roots() {
    const int64_t* token = growing_.fed_tokens;
    for (int64_t i = 0; i < growing_.num_requests; ++i) {
      const TreeGrowth& growth = growing_.growths[i];
      rows_.tree_starts[i] = growth.root + 1;
      for (int64_t slot = growth.root - growing_.num_fed[i] + 1; slot <= growth.root; ++slot) add_row(i, *token++, slot, slot, 0);
      candidates_[i] = {{token[-1], 0, -1, -1, 0}};
      if (growth.max_nodes == 0) continue;
      rows_.kept.push_back(rows_.size() - 1);
      fed_.push_back({i, 0});
    }
    forward_rows();
  }

  // Feed the nodes that were chosen, which are at a depth, if that pays; return whether it does.
  bool feed(int64_t depth) {
    if (gain_ <= 1) {
      for (const Fed& node : next_) candidate(node).slot = -1;
      return false;
    }
    gain_ = 0;
    fed_.swap(next_);
    next_.clear();
    rows_.clear();
    for (const Fed& node : fed_) {
      const int64_t root = growing_.growths[node.request].root;
      const Candidate& fed = candidate(node);
      rows_.kept.push_back(rows_.size());
      add_row(node.request, fed.token, root + depth, root + 1 + fed.slot, fed.bits);
    }
    forward_rows();
    return true;
  }

  // Choose the children of the nodes fed at a depth.
  void take(int64_t depth) {
    const int64_t num_rows = fed_.size(), stride = decoder_.head.num_outputs;
    int64_t most = 1;
    for (const Fed& node : fed_) most = std::max(most, num_children(node));
    tokens_.resize(num_rows * most);
    logprobs_.resize(num_rows * most);
    share(decoder_.team, num_rows, vocab_size_, [&](int64_t row) {
      choose(fed_[row], depth, logits_ + row * stride, &tokens_[row * most], &logprobs_[row * most]);
    });
    for (int64_t row = 0; row < num_rows;) {
      const int64_t request = fed_[row].request, first = row;
      while (row < num_rows && fed_[row].request == request) ++row;
      if (growing_.growths[request].parents)
        for (int64_t each = first; each < row; ++each) fill(fed_[each], &tokens_[each * most]);
      else
        expand(request, depth + 1, first, row, most);
    }
  }

  int64_t num_children(const Fed& node) const {
    const TreeGrowth& growth = growing_.growths[node.request];
    return growth.parents ? std::count(growth.parents, growth.parents + growth.max_nodes, node.index - 1) : growth.num_children;
  }

  // Choose the tokens that may follow a node and, if several are compared, compute their log-probabilities.
  void choose(const Fed& node, int64_t depth, const T* logits, int64_t* tokens, float* logprobs) {
    const TreeGrowth& growth = growing_.growths[node.request];
    const int64_t count = num_children(node);
    if (growth.is_sampled) {
      float* probs = growing_.probs + (growth.first_probs + 1 + candidate(node).slot) * growing_.target_vocab_size;
      distribution_row(logits, growth.options, probs, vocab_size_);
      std::fill(probs + vocab_size_, probs + growing_.target_vocab_size, 0.0f);
      draw_siblings(probs, growth.options.seed, growth.options.position + depth, count, tokens, growing_.target_vocab_size);
    } else if (growth.parents && count == 1) {
      *tokens = std::max<int64_t>(argmax_row(logits, vocab_size_), 0);
    } else if (growth.parents) {
      largest_entries(logits, tokens, logprobs, count, vocab_size_);
      for (int64_t j = 0; j < count; ++j)
        if (logprobs[j] == kMinusInfinity) tokens[j] = -1; // no token is left
    } else {
      top_candidates_row(logits, growth.options.temperature, tokens, logprobs, count, vocab_size_);
    }
  }

  // Give the children of a node of a shape their tokens; those that no token was left for, and their descendants, are left out, but fed
  // as if they were there. Nodes are fed at their own indices, if they have children.
  void fill(const Fed& parent, const int64_t* tokens) {
    const TreeGrowth& growth = growing_.growths[parent.request];
    std::vector<Candidate>& mine = candidates_[parent.request];
    mine.resize(1 + growth.max_nodes);
    const Candidate& above = mine[parent.index];
    const int32_t* end = growth.parents + growth.max_nodes;
    for (int32_t node = above.slot + 1; node < growth.max_nodes; ++node) {
      if (growth.parents[node] != above.slot) continue;
      const int64_t token = *tokens++;
      const bool is_fed = std::find(growth.parents + node + 1, end, node) < end;
      mine[1 + node] = {token, token < 0 ? kMinusInfinity : above.score, above.slot, is_fed ? node : -1, above.bits | int64_t{1} << node};
      if (!is_fed) continue;
      next_.push_back({parent.request, 1 + node});
      gain_ = -kMinusInfinity;
    }
  }

  // Add the children of a beam's nodes, which were fed as rows `first` to `last`, as candidates at `depth`, except those that are
  // not worth verifying, and choose those that are worth feeding.
  void expand(int64_t request, int64_t depth, int64_t first, int64_t last, int64_t stride) {
    const TreeGrowth& growth = growing_.growths[request];
    const Worth& worth = growth.worth;
    std::vector<Candidate>& mine = candidates_[request];
    const float agreement = static_cast<float>(std::pow(worth.agreement, depth));
    const int64_t begin = mine.size();
    if (depth == 1) growing_.first_scores[growth.row] = logprobs_[first * stride];
    for (int64_t row = first; row < last; ++row) {
      const Candidate parent = mine[fed_[row].index]; // a copy: `mine` grows
      for (int64_t j = 0; j < growth.num_children; ++j) {
        const float score = parent.score + logprobs_[row * stride + j];
        const bool is_worth_it = agreement * std::exp(score) >= worth.node_price;
        mine.push_back({tokens_[row * stride + j], is_worth_it ? score : kMinusInfinity, parent.slot, -1, parent.bits});
      }
    }
    if (depth >= growth.depth) return;
    const auto best = best_candidates(mine, begin, growth.width);
    for (size_t j = 0; j < best.size(); ++j) {
      const float value = agreement * std::exp(best[j]->score);
      const float profit = value * worth.acceptance - (worth.node_price + worth.row_price);
      if (!(profit > 0)) break; // nor are those after it, whose scores are lower
      next_.push_back({request, best[j] - mine.data()});
      Candidate& chosen = candidate(next_.back());
      chosen.slot = static_cast<int32_t>((depth - 1) * growth.width + j);
      chosen.bits |= int64_t{1} << chosen.slot;
      gain_ += profit / worth.pass_price;
    }
  }

  // Write the tree of a request after those of the requests before it: the best ancestor-closed set of at most max_nodes candidates, the
  // path of first children first, see `titan/kernels/torch/trees.py`.
  void finish(int64_t request) {
    const TreeGrowth& growth = growing_.growths[request];
    const NodeColumns& nodes = growing_.nodes;
    std::vector<const Candidate*> order, others; // the main path, then the others
    for (const Candidate* each : best_candidates(candidates_[request], 1, growth.max_nodes)) {
      const int32_t end = order.empty() ? -1 : order.back()->slot;
      const bool goes_on = each->parent_slot == end && (order.empty() || end >= 0);
      (goes_on ? order : others).push_back(each);
    }
    order.insert(order.end(), others.begin(), others.end());
    const int64_t first = num_nodes_, count = order.size();
    for (int64_t node = 0; node < count; ++node) {
      const Candidate& each = *order[node];
      int64_t parent = -1;
      for (int64_t other = 0; each.parent_slot >= 0 && other < node; ++other)
        if (order[other]->slot == each.parent_slot) parent = other;
      nodes.token_ids[first + node] = each.token;
      nodes.parents[first + node] = static_cast<int32_t>(parent);
      nodes.depths[first + node] = parent < 0 ? 1 : nodes.depths[first + parent] + 1;
      nodes.ancestor_bits[first + node] = int64_t{1} << node | (parent < 0 ? 0 : nodes.ancestor_bits[first + parent]);
      nodes.scores[first + node] = each.score;
      nodes.draft_slots[first + node] = each.slot;
    }
    growing_.counts[growth.row] = count;
    growing_.is_chain[growth.row] = others.empty(); // the first of them is no child of the path's end, or it would be on it
    if (growth.is_sampled) {
      int32_t* rows = growing_.draft_rows + first + growth.row; // each row of the plan before it has a root
      *rows = static_cast<int32_t>(growth.first_probs);
      for (int64_t node = 0; node < count; ++node) rows[1 + node] = *rows + 1 + nodes.draft_slots[first + node];
    }
    num_nodes_ += count;
  }

  const Decoder& decoder_;
  Growing& growing_;
  Rows rows_;
  std::vector<std::vector<Candidate>> candidates_; // of each request: its root, then a shape's nodes, or a beam's so far
  std::vector<Fed> fed_;  // of the rows of `logits_`, request by request
  std::vector<Fed> next_; // chosen among their children
  double gain_ = 0;       // of feeding these, in prices of a pass; infinite for a shape
  WorkingMemory memory_;
  T* logits_ = nullptr; // in the working memory
  std::vector<int64_t> tokens_;
  std::vector<float> logprobs_;
  int64_t vocab_size_;
  int64_t num_nodes_ = 0; // of the trees that are finished
};

template <typename T>
void grow(const Decoder& decoder, Growing& growing) {
  TreeGrower<T>(decoder, growing).run();
}

} // namespace
