// What a call allocates; and memory that is there already, given out for those of its allocations that belong in it.
//
// No kernel is told where its result is to lie. But a kernel that is called alike allocates alike, so what one call
// allocated says which allocation of the next one is which.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "live_watch.h"

namespace ooc_torch __attribute__((visibility("hidden"))) {

// Memory that one call allocated.
struct Allocation {
  uint64_t bytes;
  char* address;
};

class CallMemory {
 public:
  // Of the calling thread's innermost call that is looked at; null: none.
  static CallMemory* current() { return allocations_watched() ? current_ : nullptr; }

  // For a call of which nothing is known.
  CallMemory() = default;
  // `like` is what such a call allocated before; `places` has an address for each of these, or null.
  CallMemory(std::vector<Allocation> like, std::vector<char*> places) : like_(std::move(like)), places_(std::move(places)) {}
  CallMemory(const CallMemory&) = delete;
  CallMemory& operator=(const CallMemory&) = delete;

  // While this lives, the thread's allocations are the call's. Null: nothing changes.
  class During {
   public:
    explicit During(CallMemory* memory) : outer_(current_) {
      if (memory != nullptr) current_ = memory;
    }
    ~During() { current_ = outer_; }
    During(const During&) = delete;
    During& operator=(const During&) = delete;

   private:
    CallMemory* const outer_;
  };

  // The memory for the next allocation; null: it is allocated as always, and then told of.
  char* place_for(uint64_t bytes) {
    const size_t index = made_.size();
    in_step_ &= index < like_.size() && like_[index].bytes == bytes;
    char* place = in_step_ ? places_[index] : nullptr;
    if (place != nullptr) allocated(bytes, place);
    return place;
  }
  void allocated(uint64_t bytes, void* address) { made_.push_back({bytes, static_cast<char*>(address)}); }
  bool gave(const void* address) const { return std::find(places_.begin(), places_.end(), address) != places_.end(); }
  const std::vector<Allocation>& made() const { return made_; }
  std::vector<Allocation> take() { return std::move(made_); }

 private:
  static inline thread_local CallMemory* current_ = nullptr;
  const AllocationsWatched watched_;
  const std::vector<Allocation> like_;
  const std::vector<char*> places_;
  std::vector<Allocation> made_;
  bool in_step_ = true;
};

}  // namespace ooc_torch
