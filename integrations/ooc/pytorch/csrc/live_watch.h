// The bytes that a thread has live at once while it is watched: what a kernel takes beside what was there before.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <memory>
#include <unordered_map>
#include <utility>

namespace ooc_torch __attribute__((visibility("hidden"))) {

// Threads of which somebody wants to hear each allocation and each free. As long as there is none, both cost one look.
inline std::atomic<int> threads_watched{0};

class AllocationsWatched {
 public:
  AllocationsWatched() { ++threads_watched; }
  ~AllocationsWatched() { --threads_watched; }
  AllocationsWatched(const AllocationsWatched&) = delete;
  AllocationsWatched& operator=(const AllocationsWatched&) = delete;
};

inline bool allocations_watched() { return __builtin_expect(threads_watched.load(std::memory_order_relaxed) > 0, false); }

// Blocks of the thread that were allocated and freed since `begin`; those that it frees and had before do not count.
class LiveWatch {
 public:
  static LiveWatch* current() { return current_.get(); }
  static void begin() { current_ = std::make_unique<LiveWatch>(); }
  // Returns the most bytes that were live at once.
  static size_t end() {
    const auto ended = std::exchange(current_, nullptr);
    return ended ? ended->peak_ : 0;
  }

  void allocated(const void* address, size_t bytes) {
    blocks_[address] = bytes;
    peak_ = std::max(peak_, live_ += bytes);
  }
  void freed(const void* address) {
    const auto found = blocks_.find(address);
    if (found == blocks_.end()) return;
    live_ -= found->second;
    blocks_.erase(found);
  }

 private:
  static inline thread_local std::unique_ptr<LiveWatch> current_;
  std::unordered_map<const void*, size_t> blocks_;
  size_t live_ = 0, peak_ = 0;
  const AllocationsWatched watched_;
};

}  // namespace ooc_torch
