// Gated feed-forward parts in one call.

#pragma once

#include <vector>

#include "layer.h"
#include "linear.h"
#include "team.h"

namespace {

template <typename T>
void gated_mlp(Team* team, const Weight& gate_up, const Weight& down, const T* x, int64_t num_rows, T* output) {
  const int64_t num_room = std::max(linear_lines<T>(gate_up, num_rows), linear_lines<T>(down, num_rows));
  const int64_t num_wide = num_lines<T>(num_rows * gate_up.num_outputs);
  static thread_local std::vector<Line> buffer;
  buffer.resize(num_room + num_wide + num_lines<T>(num_rows * down.num_inputs));
  Line* room = buffer.data();
  T* wide = reinterpret_cast<T*>(room + num_room);
  T* gated = reinterpret_cast<T*>(room + num_room + num_wide);
  team->run([&](Member& member) {
    linear<T>(member, gate_up, x, num_rows, nullptr, wide, room);
    gate<silu>(member, wide, gated, num_rows, down.num_inputs);
    linear<T>(member, down, gated, num_rows, nullptr, output, room);
  });
}

} // namespace

#define TITAN_DEFINE_MLP(T, NAME)                                                                                              \
  extern "C" void gated_mlp_##NAME(Team* team, const Weight* gate_up, const Weight* down, const T* x, int64_t num_rows,        \
                                   T* output) {                                                                                \
    gated_mlp(team, *gate_up, *down, x, num_rows, output);                                                                     \
  }
