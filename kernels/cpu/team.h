// Threads that share work. Each takes chunks of its own part, which lies side by side in memory, and then those of the others that they
// have not come to, so that a thread that the system holds up holds up no other; one that waits spins for a moment, then lets others
// have its core, and at last sleeps.

#pragma once

#include <atomic>
#include <exception>
#include <mutex>
#include <new>
#include <thread>

#include <unistd.h>

#include "numbers.h"

namespace {

constexpr int64_t kJobSize = 16384;     // elements of a job that is worth sharing: threads may be asleep
constexpr int64_t kChunkSize = 4096;    // least elements of a chunk of it
constexpr int64_t kChunksPerThread = 8; // most chunks of a phase for each thread: an uneven end costs an eighth
constexpr int64_t kKeptLines = num_lines<uint8_t>(64 << 20); // of working memory; only long prompts need more
constexpr int kSpins = 2000;            // of a thread that waits before it lets others have its core, up to 100 microseconds
constexpr int kYields = 4000;           // of it before it sleeps, some milliseconds: steps follow one another

inline void pause_thread() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb"); // `yield` takes no time on most
#endif
}

// Wait until `is_done` of the value; whoever makes it true must notify.
template <typename Number, typename Condition>
Number wait_until(const std::atomic<Number>& value, const Condition& is_done) {
  for (int64_t i = 0;; ++i) {
    const Number now = value.load();
    if (is_done(now)) return now;
    if (i < kSpins)
      pause_thread();
    else if (i < kSpins + kYields)
      std::this_thread::yield();
    else
      value.wait(now);
  }
}

class Team;

// What one thread knows of a job: it runs the same code as the others, and calls `share` as often as they do.
class Member {
public:
  Member(Team& team, bool is_alone, int64_t index = 0) : team_(team), is_alone_(is_alone), index_(index) {}

  // Call `work(i)` for i in 0 .. count - 1, each once by any thread; return when all calls have returned.
  // `size` is how many numbers one call reads or multiplies.
  template <typename Work>
  void share(int64_t count, int64_t size, const Work& work);

private:
  Team& team_;
  const bool is_alone_;
  const int64_t index_; // of its thread
  uint32_t phase_ = 0;  // calls of `share` so far
  uint32_t chunks_ = 0; // of all phases so far
};

class Team {
public:
  explicit Team(int64_t num_threads) : num_threads_(num_threads), parts_(new Part[num_threads]) {
    try {
      for (int64_t i = 1; i < num_threads; ++i) threads_.emplace_back([this, i] { serve(i); });
    } catch (...) { // the system has no more threads
      stop();
      throw;
    }
  }

  ~Team() {
    delete spare_.load();
    if (is_forked())
      new std::vector<std::thread>(std::move(threads_)); // never destroyed: they are not here
    else
      stop();
  }

  int64_t num_threads() const { return num_threads_; }

  // Run `body(member)` on all threads that are free, or of few numbers on this one; return when all have. It must not throw but in
  // `share`. Throws std::bad_alloc if there was too little memory for some of its work.
  template <typename Body>
  void run(const Body& body, int64_t size = std::numeric_limits<int64_t>::max()) {
    if (size <= kJobSize || num_threads_ == 1 || is_forked()) {
      Member member(*this, true);
      return body(member);
    }
    const std::lock_guard<std::mutex> lock(mutex_); // models of several engines may share a team
    body_ = &body;
    call_ = [](const void* each, Member& member) { (*static_cast<const Body*>(each))(member); };
    for (int64_t i = 0; i < num_threads_; ++i) parts_[i].ticket.store(0, std::memory_order_relaxed);
    finished_.store(0, std::memory_order_relaxed);
    job_.fetch_add(1);
    job_.notify_all();
    Member member(*this, false);
    body(member);
    job_.fetch_add(1);
    wait_until(inside_, [](uint32_t inside) { return inside == 0; });
    if (lacks_memory_.exchange(false)) throw std::bad_alloc();
  }

  // Return working memory for a call, which the team keeps for the next one; calls at the same time have some of their own.
  auto working_memory() {
    const auto keep = [this](WorkingMemory* used) { delete (used->size() > kKeptLines ? used : spare_.exchange(used)); };
    WorkingMemory* spare = spare_.exchange(nullptr);
    return std::unique_ptr<WorkingMemory, decltype(keep)>(spare ? spare : new WorkingMemory, keep);
  }

private:
  friend class Member;

  // A phase, and the next chunk of a thread's part of it: of a later phase it is more. On a line of its own, as what follows:
  // processors fetch two at a time.
  struct alignas(128) Part {
    std::atomic<uint64_t> ticket{0};
  };

  // Take a chunk of the part of a thread, which has `count` in this phase; return -1 if there is none left.
  int64_t take(int64_t part, uint32_t phase, int64_t count) {
    const uint64_t first = static_cast<uint64_t>(phase) << 32;
    std::atomic<uint64_t>& ticket = parts_[part].ticket;
    for (uint64_t now = ticket.load(std::memory_order_acquire);;) {
      const uint64_t next = std::max(now, first); // where it is of an earlier phase, nobody has taken a chunk yet
      if (next >= first + count) return -1;
      if (ticket.compare_exchange_weak(now, next + 1, std::memory_order_acq_rel)) return next - first;
    }
  }

  // Whether this process was forked from the one that has the threads.
  bool is_forked() const { return getpid() != process_; }

  void stop() {
    is_closing_.store(true);
    job_.fetch_add(2);
    job_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  void serve(int64_t index) {
    for (uint32_t seen = 0; !is_closing_.load();) {
      seen = wait_until(job_, [seen](uint32_t job) { return job != seen; });
      if (seen % 2 == 0) continue;
      inside_.fetch_add(1);
      if (job_.load() == seen) {
        Member member(*this, false, index);
        call_(body_, member);
      }
      if (inside_.fetch_sub(1) == 1) inside_.notify_all();
    }
  }

  const int64_t num_threads_;
  const pid_t process_ = getpid();
  std::vector<std::thread> threads_;
  std::mutex mutex_;
  std::atomic<WorkingMemory*> spare_{nullptr}; // kept for the next call
  const void* body_ = nullptr;
  void (*call_)(const void*, Member&) = nullptr;
  std::atomic<bool> is_closing_{false};
  std::atomic<bool> lacks_memory_{false}; // for a part of the job
  const std::unique_ptr<Part[]> parts_;
  alignas(128) std::atomic<uint32_t> job_{0};      // odd while a job is open to threads
  alignas(128) std::atomic<uint32_t> inside_{0};   // threads that may look at the job, besides the one that called `run`
  alignas(128) std::atomic<uint32_t> finished_{0}; // chunks of all phases so far
};

template <typename Work>
void Member::share(int64_t count, int64_t size, const Work& work) {
  if (is_alone_) {
    for (int64_t i = 0; i < count; ++i) work(i);
    return;
  }
  const int64_t num_parts = team_.num_threads_, most = num_parts * kChunksPerThread;
  const int64_t least = std::max<int64_t>(kChunkSize / std::max<int64_t>(size, 1), 1);
  const int64_t chunk = std::max((count + most - 1) / most, least);
  const int64_t num_chunks = (count + chunk - 1) / chunk;
  const auto begin_of = [&](int64_t part) { return (num_chunks * part + num_parts - 1) / num_parts; };
  ++phase_;
  chunks_ += static_cast<uint32_t>(num_chunks);
  for (int64_t i = 0; i < num_parts; ++i) {
    const int64_t part = (index_ + i) % num_parts, first = begin_of(part), num_own = begin_of(part + 1) - first;
    for (int64_t taken; (taken = team_.take(part, phase_, num_own)) >= 0;) {
      const int64_t begin = (first + taken) * chunk;
      try {
        if (!team_.lacks_memory_.load(std::memory_order_relaxed))
          for (int64_t each = begin; each < std::min(begin + chunk, count); ++each) work(each);
      } catch (const std::bad_alloc&) { // the others count on this chunk: they pass over what is left, and `run` reports it
        team_.lacks_memory_ = true;
      }
      if (team_.finished_.fetch_add(1, std::memory_order_acq_rel) + 1 == chunks_) team_.finished_.notify_all();
    }
  }
  wait_until(team_.finished_, [this](uint32_t finished) { return static_cast<int32_t>(finished - chunks_) >= 0; });
}

// Share the work of a single phase; there is nothing to share of a single call.
template <typename Work>
void share(Team* team, int64_t count, int64_t size, const Work& work) {
  team->run([&](Member& member) { member.share(count, size, work); }, count > 1 ? count * size : 0);
}

// Return null if the system does not have so many threads.
inline void* make_team(int64_t num_threads) {
  try {
    return new Team(num_threads);
  } catch (const std::exception&) {
    return nullptr;
  }
}

inline void free_team(void* team) { delete static_cast<Team*>(team); }

} // namespace
