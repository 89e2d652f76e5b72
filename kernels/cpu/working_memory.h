// Working memory of passes, and the parts of their rows that it has room for.

#pragma once

#include <cstdint>
#include <memory>

#include "numbers.h"

namespace {

// Storage for numbers of any type, aligned so that each whole vector lies in one cache line.
struct __attribute__((may_alias, aligned(kLanes * sizeof(float)))) Line {
  float lanes[kLanes];
};

// Number of lines that hold `count` numbers.
template <typename T>
constexpr int64_t num_lines(int64_t count) {
  return (count * sizeof(T) + sizeof(Line) - 1) / sizeof(Line);
}

// Working memory of a thread, which it keeps for its next call, with whatever is in it.
class WorkingMemory {
public:
  Line* lines(int64_t count) {
    if (count > size_) {
      free(); // first: there may be no room for both
      lines_.reset(new Line[count]);
      size_ = count;
    }
    return lines_.get();
  }

  // Free it if only long prompts need so much: each thread that ever led a step would keep it.
  void give_back() {
    if (size_ * sizeof(Line) > kKeptBytes) free();
  }

private:
  static constexpr size_t kKeptBytes = 64 << 20;

  void free() {
    lines_.reset();
    size_ = 0;
  }

  std::unique_ptr<Line[]> lines_;
  int64_t size_ = 0;
};

// Call work(first, count) for rows in parts of nearly equal size.
template <typename Work>
void for_parts(int64_t num_rows, int64_t most_rows, const Work& work) {
  const int64_t num_parts = (num_rows + most_rows - 1) / most_rows;
  for (int64_t part = 0; part < num_parts; ++part) {
    const int64_t first = num_rows * part / num_parts;
    work(first, num_rows * (part + 1) / num_parts - first);
  }
}

} // namespace
