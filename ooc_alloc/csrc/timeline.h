// The timeline: a bounded ring of what happened, kept while somebody wants it. The newest events stay; memory is fixed.
//
// Guarded by the core's lock, but for `on`: where nobody watches, a function pays for one look at a flag. An event has
// a position, counted from the first one ever; it may be filled in later (its end, its bytes) for as long as it is
// kept. Ranges: the same functions and stalls for NVTX, through whatever library has nvtxRangePushA and nvtxRangePop.
#pragma once

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "ooc_alloc.h"

namespace ooc {

class Timeline {
 public:
  static constexpr uint64_t kNoEvent = ~uint64_t{0};
  static constexpr double kNotOver = -1;

  bool on() const { return on_.load(std::memory_order_relaxed); }
  // Forgets what was there. `capacity` is rounded up to a power of two. Throws std::bad_alloc.
  void start(uint64_t capacity) {
    constexpr uint64_t kLeast = 64, kMost = uint64_t{1} << 24;
    uint64_t size = kLeast;
    while (size < std::min(capacity, kMost)) size *= 2;
    std::vector<ooc_event> fresh(size);  // written once, so that its pages are there
    events_ = std::move(fresh);
    mask_ = size - 1;
    first_ = next_;
    on_.store(true, std::memory_order_relaxed);
  }
  // What was recorded can still be read.
  void stop() { on_.store(false, std::memory_order_relaxed); }

  uint64_t add(const ooc_event& event) {
    events_[next_ & mask_] = event;
    return next_++;
  }
  // Null if it was overwritten, or recorded before the last start.
  ooc_event* at(uint64_t position) {
    if (position >= next_ || position < oldest()) return nullptr;
    return &events_[position & mask_];
  }

  uint64_t capacity() const { return events_.size(); }
  uint64_t recorded() const { return next_ - first_; }
  uint64_t oldest() const { return next_ - first_ > events_.size() ? next_ - events_.size() : first_; }
  uint64_t lost() const { return oldest() - first_; }
  uint64_t next() const { return next_; }
  // Copies at most `count` events from position `*from` on, or from the oldest that is kept; *from becomes the first
  // one's.
  uint32_t read(uint64_t* from, ooc_event* events, uint32_t count) const {
    *from = std::min(std::max(*from, oldest()), next_);
    const auto found = static_cast<uint32_t>(std::min<uint64_t>(count, next_ - *from));
    for (uint32_t i = 0; i < found; ++i) events[i] = events_[(*from + i) & mask_];
    return found;
  }

 private:
  std::atomic<bool> on_{false};
  std::vector<ooc_event> events_;
  uint64_t mask_ = 0;
  uint64_t first_ = 0, next_ = 0;  // of this recording; to be written next
};

class Ranges {
 public:
  bool on() const { return on_.load(std::memory_order_acquire); }
  // Returns false if the library or its functions are not there; `reason` says which. Once on, it stays on.
  bool load(const char* library, std::string& reason) {
    if (on()) return true;
    void* handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);  // never closed: its functions may be called at any time
    if (handle == nullptr) {
      reason = dlerror();
      return false;
    }
    push_ = reinterpret_cast<int (*)(const char*)>(dlsym(handle, "nvtxRangePushA"));
    pop_ = reinterpret_cast<int (*)()>(dlsym(handle, "nvtxRangePop"));
    if (push_ == nullptr || pop_ == nullptr) {
      reason = std::string(library) + " has no nvtxRangePushA or no nvtxRangePop";
      return false;
    }
    on_.store(true, std::memory_order_release);
    return true;
  }
  void push(const char* name) const { push_(name); }
  void pop() const { pop_(); }

 private:
  std::atomic<bool> on_{false};
  int (*push_)(const char*) = nullptr;
  int (*pop_)() = nullptr;
};

}  // namespace ooc
