// The threads that call a core, and how many of their functions run. A thread finds its own state without the lock.
//
// A function ends without the lock where nobody waits for that, so the counts are atomic: whoever waits says so
// (starving, yielding) before looking at them, so one of the two sees the other.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <deque>
#include <iterator>

#include "thread_state.h"

namespace ooc {

class Core;

// Cores that are alive, for threads that exit and processes that fork; and the ids that tell cores apart (fork.cpp).
uint64_t new_core_id();  // unique for the life of the process
void register_core(uint64_t id, Core* core);
void unregister_core(uint64_t id);
// The calling thread's entries, which tell the cores when it exits.
void add_thread_entry(const ThreadEntry& entry);
const ThreadEntry* find_thread_entry(uint64_t core_id);

class Threads {
 public:
  Threads() : core_id_(new_core_id()) {}

  // The calling thread's state; null if it has none here.
  ThreadState* find() const {
    const ThreadEntry& latest = latest_entry;
    return latest.core_id == core_id_ ? latest.state : search();
  }
  // A new state for the calling thread. The core's lock is held.
  ThreadState& add() {
    auto free = std::find_if(states_.begin(), states_.end(), [](const ThreadState& state) { return state.exited; });
    if (free == states_.end()) {
      states_.emplace_back();
      free = std::prev(states_.end());
    }
    *free = ThreadState{};
    free->number = ++count_;
    add_thread_entry({core_id_, &*free});
    return *free;
  }
  void exits(ThreadState* thread) { thread->exited = true; }
  uint64_t core_id() const { return core_id_; }

  std::deque<ThreadState>& all() { return states_; }
  const std::deque<ThreadState>& all() const { return states_; }

  // ---- functions
  void begins() { progress_ += kOneRuns; }
  void ends() { progress_ += kOneEnded - kOneRuns; }
  void takes_back() { progress_ -= kOneRuns; }  // a function that began did not begin after all
  uint32_t active() const { return static_cast<uint32_t>(progress_.load()); }
  uint32_t ended() const { return static_cast<uint32_t>(progress_.load() >> 32); }

  // ---- work that a library goes on with in threads of its own (a collective), on memory that is pinned for it. Guarded
  // by the core's lock.
  void work_begins() { ++works_; }
  void work_ends() {
    --works_;
    progress_ += kOneEnded;
  }
  uint32_t works() const { return works_; }
  // Whether some of it may end while the caller waits. `counted`: the caller is a function; else it may be such work.
  bool work_may_end(bool counted) const {
    if (counted) return works_ > starving_works;
    return works_ > starving_works + 1 || (works_ > 0 && starving > 0);  // a function that waits for it fails first
  }

  std::atomic<uint32_t> starving{0};  // functions that wait for the end of others
  std::atomic<uint32_t> starving_works{0};  // works that wait for the end of functions, or of other works
  std::atomic<uint32_t> yielding{0};  // functions that have let go of their operands, and wait

 private:
  ThreadState* search() const {
    const ThreadEntry* entry = find_thread_entry(core_id_);
    if (entry == nullptr) return nullptr;
    latest_entry = *entry;
    return entry->state;
  }

  static constexpr uint64_t kOneRuns = 1, kOneEnded = uint64_t{1} << 32;
  uint64_t core_id_;
  std::deque<ThreadState> states_;
  uint32_t count_ = 0, works_ = 0;
  std::atomic<uint64_t> progress_{0};  // functions that have ended, and in the lower half those that run
};

// While one exists, the caller counts as one that waits for others to end. `counted`: it is a function; else, while there
// is work of a library, it is taken to be that work.
class Starving {
 public:
  Starving(Threads& threads, bool counted)
      : count_(counted ? threads.starving : threads.starving_works), one_(counted || threads.works() > 0 ? 1 : 0) {
    count_ += one_;
  }
  ~Starving() { count_ -= one_; }
  Starving(const Starving&) = delete;
  Starving& operator=(const Starving&) = delete;

 private:
  std::atomic<uint32_t>& count_;
  uint32_t one_;
};

}  // namespace ooc
