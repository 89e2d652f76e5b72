// Growing draft trees: the passes over all their depths, and the choices between them, in one call.

#pragma once

#include <algorithm>
#include <chrono>
#include <cmath>
#include <vector>

#include "attention.h"
#include "decoder.h"
#include "numbers.h"
#include "sampling.h"

extern "C" {

constexpr int64_t kMaxNodes = 63;

// A shape that is known beforehand, see `ShapePlan` of `titan/draft/shapes.py`. I inner nodes, the root first.
struct TreeShape {
  int64_t num_nodes;
  int64_t num_inner;
  const int64_t* inner;        // [6, I]: the node, -1 for the root; its depth; its parent's place; its rank; ancestor bits; children
  const int64_t* node_parents; // [num_nodes], the parent's place among the inner nodes
  const int64_t* ranks;        // [num_nodes]
};

// How the tree of one request grows: it fills a shape, or a beam expands the best nodes of each depth.
struct TreeGrowth {
  const TreeShape* shape; // none: a beam
  int64_t root;           // position of the root
  int64_t depth;          // of a beam's deepest nodes
  int64_t width;          // nodes that a beam expands at each depth
  int64_t num_children;   // tokens that a beam looks at behind each; with 1 the most likely tokens are followed, whatever their scores
  int64_t budget;         // nodes of a beam's tree
  int64_t first_inner;    // where the inner nodes' rows of `probs` begin
  uint64_t seed;
  float temperature; // of draws, or at which a beam compares probabilities
  int32_t is_drawn;  // whether the nodes of a shape are drawn
};

static_assert(sizeof(TreeGrowth) == 72, "as TREE_GROWTH of compiled_decoder.py");

// The trees of n requests, and where their draft's KV is.
struct Growing {
  int64_t num_requests;
  int64_t block_size;
  int64_t table_width;
  int64_t target_vocab_size; // tokens from there on are not proposed
  int64_t num_slots;
  const TreeGrowth* growths;  // [n]
  const int64_t* block_table; // [n, table_width]
  void* kv;                   // as in DecoderPass
  const void* root_logits;    // [n, target_vocab_size], or none: the tokens below are fed first
  const int64_t* fed_tokens;  // [F]
  const int64_t* num_fed;     // [n], at least 1; the last of a request's is its root
  // what comes out; rows of kMaxNodes for each request
  int64_t* num_nodes;   // [n]
  int64_t* token_ids;   // -1 where a shape has more children than there are tokens
  int32_t* parents;     // of beams
  int32_t* draft_slots; // likewise
  float* scores;        // likewise
  float* probs;         // [all inner nodes of drawn shapes, target_vocab_size]
  int64_t num_passes;
  double pass_seconds; // that they took together
};
}

namespace {

// One node that may come into a beam's tree.
struct Candidate {
  int64_t token;
  float score;
  int32_t parent_slot; // where the parent is fed, counted from the slot behind the root; -1 for the root
  int32_t slot;        // where it is fed itself; -1 if it is not
};

// A row of a pass, or of the logits of the roots.
struct FedNode {
  int64_t request;
  int64_t place; // a shape's inner node, or which of a beam's expanded nodes
};

// A tree on its way.
struct Growth {
  std::vector<Candidate> candidates; // of a beam
  std::vector<int64_t> expanded;     // candidates that are fed at the next depth
  std::vector<int64_t> bits;         // their ancestor bits
  std::vector<int64_t> children;     // [I, kMaxNodes] of a shape, -1 where there is none
};

// Tokens of all requests that are fed together.
struct Rows {
  std::vector<int64_t> token_ids, positions, slots, bits, kept;
  std::vector<int64_t> requests, start_loc, seq_lens, tree_starts, visible_lens;

  explicit Rows(int64_t num_requests) : start_loc(num_requests + 1, 0), seq_lens(num_requests, 0), tree_starts(num_requests, 0) {}

  void clear() {
    for (auto* each : {&token_ids, &positions, &slots, &bits, &kept, &requests, &visible_lens}) each->clear();
  }

  int64_t size() const { return static_cast<int64_t>(token_ids.size()); }
};

template <typename T>
class TreeGrower {
public:
  TreeGrower(const Decoder& decoder, Growing& growing)
      : decoder_(decoder), growing_(growing), rows_(growing.num_requests), growths_(growing.num_requests),
        vocab_size_(std::min(decoder.head.num_outputs, growing.target_vocab_size)) {
    for (int64_t i = 0; i < growing.num_requests; ++i)
      if (const TreeShape* shape = growing.growths[i].shape) growths_[i].children.assign(shape->num_inner * kMaxNodes, -1);
  }

  void run() {
    for (int64_t i = 0; i < growing_.num_requests; ++i) nodes_.push_back({i, 0});
    if (growing_.root_logits) {
      take(0, static_cast<const T*>(growing_.root_logits), growing_.target_vocab_size);
    } else {
      feed_roots();
      take(0, logits_.data(), decoder_.head.num_outputs);
    }
    for (int64_t depth = 1; feed_frontier(depth); ++depth) take(depth, logits_.data(), decoder_.head.num_outputs);
    for (int64_t i = 0; i < growing_.num_requests; ++i)
      growing_.growths[i].shape ? harvest_shape(i) : harvest_beam(i);
  }

private:
  void add_row(int64_t request, int64_t token, int64_t position, int64_t slot, int64_t visible_len, int64_t bits) {
    const int64_t block = growing_.block_table[request * growing_.table_width + slot / growing_.block_size];
    rows_.token_ids.push_back(std::max<int64_t>(std::min(token, decoder_.head.num_outputs - 1), 0));
    rows_.positions.push_back(position);
    rows_.slots.push_back(block * growing_.block_size + slot % growing_.block_size);
    rows_.visible_lens.push_back(visible_len);
    rows_.bits.push_back(bits);
    rows_.seq_lens[request] = slot + 1;
  }

  // The rows of a request are complete.
  void end_request(int64_t request) {
    if (rows_.size() > rows_.start_loc[request]) rows_.requests.push_back(request);
    rows_.start_loc[request + 1] = rows_.size();
  }

  void forward_rows() {
    const AttentionPlan plan{static_cast<int64_t>(rows_.requests.size()), decoder_.num_heads, decoder_.num_kv_heads,
                             decoder_.head_dim, growing_.block_size, growing_.table_width, rows_.requests.data(),
                             rows_.start_loc.data(), rows_.seq_lens.data(), rows_.tree_starts.data(), growing_.block_table,
                             rows_.positions.data(), rows_.visible_lens.data()};
    const DecoderPass pass{rows_.size(), static_cast<int64_t>(rows_.kept.size()), rows_.token_ids.data(), rows_.positions.data(),
                           rows_.slots.data(), rows_.kept.data(), rows_.bits.data(), growing_.kv, growing_.num_slots};
    logits_.resize(rows_.kept.size() * decoder_.head.num_outputs);
    const auto start = std::chrono::steady_clock::now();
    forward(decoder_, plan, pass, logits_.data());
    growing_.pass_seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    growing_.num_passes += 1;
  }

  // Feed what the draft lacks of the committed tokens.
  void feed_roots() {
    const int64_t* token = growing_.fed_tokens;
    for (int64_t i = 0; i < growing_.num_requests; ++i) {
      for (int64_t slot = growing_.growths[i].root - growing_.num_fed[i] + 1; slot <= growing_.growths[i].root; ++slot)
        add_row(i, *token++, slot, slot, slot + 1, 0);
      end_request(i);
      rows_.kept.push_back(rows_.size() - 1);
    }
    forward_rows();
  }

  // Feed the nodes of a depth that are to have children; whether there are any.
  bool feed_frontier(int64_t depth) {
    rows_.clear();
    nodes_.clear();
    for (int64_t i = 0; i < growing_.num_requests; ++i) {
      const TreeGrowth& growth = growing_.growths[i];
      Growth& mine = growths_[i];
      const auto feed = [&](int64_t place, int64_t token, int64_t slot, int64_t bits) {
        add_row(i, token, growth.root + depth, growth.root + 1 + slot, growth.root + 1, bits);
        nodes_.push_back({i, place});
      };
      rows_.tree_starts[i] = growth.root + 1;
      if (const TreeShape* shape = growth.shape) {
        const int64_t size = shape->num_inner;
        const int64_t *nodes = shape->inner, *depths = nodes + size, *parents = depths + size, *ranks = parents + size;
        for (int64_t place = 0; place < size; ++place)
          if (depths[place] == depth)
            feed(place, mine.children[parents[place] * kMaxNodes + ranks[place]], nodes[place], ranks[size + place]);
      } else if (depth < growth.depth) {
        for (size_t j = 0; j < mine.expanded.size(); ++j) {
          const Candidate& candidate = mine.candidates[mine.expanded[j]];
          feed(j, candidate.token, candidate.slot, mine.bits[j]);
        }
      }
      end_request(i);
    }
    for (int64_t row = 0; row < rows_.size(); ++row) rows_.kept.push_back(row);
    if (rows_.size()) forward_rows();
    return rows_.size();
  }

  // Choose the children of the nodes fed at a depth, whose logits are rows of `stride`.
  void take(int64_t depth, const T* logits, int64_t stride) {
    const int64_t num_rows = nodes_.size();
    int64_t most = 1;
    for (const FedNode& node : nodes_) most = std::max(most, num_children(node));
    tokens_.resize(num_rows * most);
    logprobs_.resize(num_rows * most);
#pragma omp parallel for if (num_rows * vocab_size_ > kMaxSerial)
    for (int64_t row = 0; row < num_rows; ++row)
      choose(nodes_[row], depth, logits + row * stride, &tokens_[row * most], &logprobs_[row * most]);
    for (int64_t row = 0; row < num_rows;) {
      const int64_t request = nodes_[row].request, first = row;
      while (row < num_rows && nodes_[row].request == request) ++row;
      if (growing_.growths[request].shape) {
        for (int64_t each = first; each < row; ++each)
          std::copy_n(&tokens_[each * most], num_children(nodes_[each]), &growths_[request].children[nodes_[each].place * kMaxNodes]);
      } else {
        expand(request, depth + 1, first, row, most);
      }
    }
  }

  int64_t num_children(const FedNode& node) const {
    const TreeGrowth& growth = growing_.growths[node.request];
    return growth.shape ? growth.shape->inner[5 * growth.shape->num_inner + node.place] : growth.num_children;
  }

  // The tokens that may follow a node, and, where several are compared, their log-probabilities.
  void choose(const FedNode& node, int64_t depth, const T* logits, int64_t* tokens, float* logprobs) const {
    const TreeGrowth& growth = growing_.growths[node.request];
    const int64_t count = num_children(node);
    if (growth.shape && growth.is_drawn) {
      float* probs = growing_.probs + (growth.first_inner + node.place) * growing_.target_vocab_size;
      softmax_row(logits, growth.temperature, probs, vocab_size_);
      std::fill(probs + vocab_size_, probs + growing_.target_vocab_size, 0.0f);
      draw_siblings(probs, growth.seed, growth.root + 1 + depth, kDraft, count, tokens, growing_.target_vocab_size);
    } else if (count == 1) {
      *tokens = std::max<int64_t>(argmax_row(logits, vocab_size_), 0);
      *logprobs = 0;
    } else if (growth.shape) {
      largest_entries(logits, tokens, logprobs, count, vocab_size_);
      std::fill(tokens + std::min(count, vocab_size_), tokens + count, -1);
    } else {
      best_children_row(logits, growth.temperature, tokens, logprobs, count, vocab_size_);
    }
  }

  // Add the children of a beam's nodes, rows `first` to `last`, as candidates at `depth`, and choose which of them are fed.
  void expand(int64_t request, int64_t depth, int64_t first, int64_t last, int64_t stride) {
    const TreeGrowth& growth = growing_.growths[request];
    Growth& mine = growths_[request];
    const int64_t begin = mine.candidates.size(), k = growth.num_children;
    for (int64_t row = first; row < last; ++row) {
      const bool is_root = mine.expanded.empty();
      const Candidate parent = is_root ? Candidate{0, 0, -1, -1} : mine.candidates[mine.expanded[row - first]];
      for (int64_t j = 0; j < k; ++j)
        mine.candidates.push_back({tokens_[row * stride + j], parent.score + logprobs_[row * stride + j], parent.slot, -1});
    }
    if (depth >= growth.depth) return;
    std::vector<int64_t> best(mine.candidates.size() - begin), bits;
    for (size_t j = 0; j < best.size(); ++j) best[j] = begin + j;
    const int64_t width = std::min<int64_t>(growth.width, best.size());
    std::partial_sort(best.begin(), best.begin() + width, best.end(), [&](int64_t a, int64_t b) { return is_better(mine, a, b); });
    best.resize(width);
    for (int64_t j = 0; j < width; ++j) {
      Candidate& candidate = mine.candidates[best[j]];
      candidate.slot = static_cast<int32_t>((depth - 1) * growth.width + j);
      const int64_t above = mine.bits.empty() ? 0 : mine.bits[(best[j] - begin) / k];
      bits.push_back(above | int64_t{1} << candidate.slot);
    }
    mine.expanded = best;
    mine.bits = bits;
  }

  // Greater scores first, of equal ones the earlier, those that are not finite last.
  static bool is_better(const Growth& growth, int64_t a, int64_t b) {
    const float x = growth.candidates[a].score, y = growth.candidates[b].score;
    if (std::isfinite(x) != std::isfinite(y)) return std::isfinite(x);
    return std::isfinite(x) && x != y ? x > y : a < b;
  }

  // The best ancestor-closed set of the candidates, the path of first children first; see `best_trees` of tree_builder.py.
  void harvest_beam(int64_t request) {
    const Growth& mine = growths_[request];
    std::vector<int64_t> best;
    for (size_t j = 0; j < mine.candidates.size(); ++j)
      if (std::isfinite(mine.candidates[j].score)) best.push_back(j);
    const int64_t count = std::min<int64_t>(growing_.growths[request].budget, best.size());
    std::partial_sort(best.begin(), best.begin() + count, best.end(), [&](int64_t a, int64_t b) { return is_better(mine, a, b); });
    best.resize(count);
    std::vector<int32_t> order; // places in `best`
    const auto slot = [&](int64_t place) { return place < 0 ? -1 : mine.candidates[best[place]].slot; };
    const auto parent_slot = [&](int64_t place) { return mine.candidates[best[place]].parent_slot; };
    for (int64_t j = 0; j < count; ++j) {
      const int32_t end = slot(order.empty() ? -1 : order.back());
      if (parent_slot(j) == end && (order.empty() || end >= 0)) order.push_back(static_cast<int32_t>(j));
    }
    std::vector<bool> is_main(count, false);
    for (const int32_t j : order) is_main[j] = true;
    for (int64_t j = 0; j < count; ++j)
      if (!is_main[j]) order.push_back(static_cast<int32_t>(j));
    const int64_t start = request * kMaxNodes;
    growing_.num_nodes[request] = count;
    for (int64_t node = 0; node < count; ++node) {
      const Candidate& candidate = mine.candidates[best[order[node]]];
      growing_.token_ids[start + node] = candidate.token;
      growing_.draft_slots[start + node] = candidate.slot;
      growing_.scores[start + node] = candidate.score;
      int32_t parent = -1;
      for (int64_t other = 0; candidate.parent_slot >= 0 && other < node; ++other)
        if (slot(order[other]) == candidate.parent_slot) parent = static_cast<int32_t>(other);
      growing_.parents[start + node] = parent;
    }
  }

  void harvest_shape(int64_t request) {
    const TreeShape& shape = *growing_.growths[request].shape;
    growing_.num_nodes[request] = shape.num_nodes;
    for (int64_t node = 0; node < shape.num_nodes; ++node)
      growing_.token_ids[request * kMaxNodes + node] = growths_[request].children[shape.node_parents[node] * kMaxNodes + shape.ranks[node]];
  }

  const Decoder& decoder_;
  Growing& growing_;
  Rows rows_;
  std::vector<Growth> growths_;
  std::vector<FedNode> nodes_; // of the rows whose logits come next
  std::vector<T> logits_;
  std::vector<int64_t> tokens_;
  std::vector<float> logprobs_;
  int64_t vocab_size_;
};

} // namespace

#define TITAN_DEFINE_GROWTH(T, NAME)                                                                                           \
  extern "C" void grow_##NAME(const Decoder* decoder, Growing* growing) { TreeGrower<T>(*decoder, *growing).run(); }
