// Threads that share work. Work is taken in chunks by whoever is free, so that a thread that the system holds up holds up no other;
// a thread that waits spins for a moment, then lets others have its core, and at last sleeps.

#pragma once

#include <atomic>
#include <exception>
#include <mutex>
#include <new>
#include <thread>

#include <unistd.h>

#include "numbers.h"

namespace {

constexpr int64_t kChunkSize = 16384;   // least elements of a chunk that is worth sharing
constexpr int64_t kChunksPerThread = 8; // most chunks of a phase for each thread: an uneven end costs an eighth
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
  Member(Team& team, bool is_alone) : team_(team), is_alone_(is_alone) {}

  // Call `work(i)` for i in 0 .. count - 1, each once by any thread; return when all calls have returned.
  // `size` is how many numbers one call reads or multiplies.
  template <typename Work>
  void share(int64_t count, int64_t size, const Work& work);

private:
  Team& team_;
  const bool is_alone_;
  uint32_t phase_ = 0;  // calls of `share` so far
  uint32_t chunks_ = 0; // of all phases so far
};

class Team {
public:
  explicit Team(int64_t num_threads) : num_threads_(num_threads) {
    try {
      for (int64_t i = 1; i < num_threads; ++i) threads_.emplace_back([this] { serve(); });
    } catch (...) { // the system has no more threads
      stop();
      throw;
    }
  }

  ~Team() {
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
    if (size <= kChunkSize || num_threads_ == 1 || is_forked()) {
      Member member(*this, true);
      return body(member);
    }
    const std::lock_guard<std::mutex> lock(mutex_); // models of several engines may share a team
    body_ = &body;
    call_ = [](const void* each, Member& member) { (*static_cast<const Body*>(each))(member); };
    ticket_.store(0, std::memory_order_relaxed);
    finished_.store(0, std::memory_order_relaxed);
    job_.fetch_add(1);
    job_.notify_all();
    Member member(*this, false);
    body(member);
    job_.fetch_add(1);
    wait_until(inside_, [](uint32_t inside) { return inside == 0; });
    if (lacks_memory_.exchange(false)) throw std::bad_alloc();
  }

private:
  friend class Member;

  // Whether this process was forked from the one that has the threads.
  bool is_forked() const { return getpid() != process_; }

  void stop() {
    is_closing_.store(true);
    job_.fetch_add(2);
    job_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  void serve() {
    for (uint32_t seen = 0; !is_closing_.load();) {
      seen = wait_until(job_, [seen](uint32_t job) { return job != seen; });
      if (seen % 2 == 0) continue;
      inside_.fetch_add(1);
      if (job_.load() == seen) {
        Member member(*this, false);
        call_(body_, member);
      }
      if (inside_.fetch_sub(1) == 1) inside_.notify_all();
    }
  }

  const int64_t num_threads_;
  const pid_t process_ = getpid();
  std::vector<std::thread> threads_;
  std::mutex mutex_;
  const void* body_ = nullptr;
  void (*call_)(const void*, Member&) = nullptr;
  std::atomic<bool> is_closing_{false};
  std::atomic<bool> lacks_memory_{false}; // for a part of the job
  // each on lines of its own: processors fetch two at a time
  alignas(128) std::atomic<uint32_t> job_{0};    // odd while a job is open to threads
  alignas(128) std::atomic<uint32_t> inside_{0}; // threads that may look at the job, besides the one that called `run`
  alignas(128) std::atomic<uint64_t> ticket_{0}; // the phase of the job, and its next chunk
  alignas(128) std::atomic<uint32_t> finished_{0}; // chunks of all phases so far
};

template <typename Work>
void Member::share(int64_t count, int64_t size, const Work& work) {
  if (is_alone_) {
    for (int64_t i = 0; i < count; ++i) work(i);
    return;
  }
  const int64_t most = team_.num_threads_ * kChunksPerThread;
  const int64_t least = std::max<int64_t>(kChunkSize / std::max<int64_t>(size, 1), 1);
  const int64_t chunk = std::max((count + most - 1) / most, least);
  const uint32_t num_chunks = static_cast<uint32_t>((count + chunk - 1) / chunk);
  const uint64_t first = static_cast<uint64_t>(phase_++) << 32, end = first + num_chunks;
  chunks_ += num_chunks;
  for (uint64_t ticket = team_.ticket_.load(std::memory_order_acquire); ticket >= first && ticket < end;) {
    if (!team_.ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel)) continue;
    const int64_t begin = static_cast<int64_t>(ticket - first) * chunk;
    try {
      if (!team_.lacks_memory_.load(std::memory_order_relaxed))
        for (int64_t i = begin; i < std::min(begin + chunk, count); ++i) work(i);
    } catch (const std::bad_alloc&) { // the others count on this chunk: they pass over what is left, and `run` reports it
      team_.lacks_memory_ = true;
    }
    if (team_.finished_.fetch_add(1, std::memory_order_acq_rel) + 1 == chunks_) team_.finished_.notify_all();
    ticket = team_.ticket_.load(std::memory_order_acquire);
  }
  wait_until(team_.finished_, [this](uint32_t finished) { return static_cast<int32_t>(finished - chunks_) >= 0; });
  uint64_t expected = end;
  team_.ticket_.compare_exchange_strong(expected, static_cast<uint64_t>(phase_) << 32, std::memory_order_acq_rel);
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
