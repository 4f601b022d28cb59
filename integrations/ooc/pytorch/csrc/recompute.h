// Recomputation: bytes that are given up and made again, as schedules say, or wherever it is possible (a test of it all).
//
// Calls that may run again are kept (kept_call.h), and a history knows which bytes they read and wrote (history.h). A schedule
// is never trusted: a variable is only dropped if the history knows how to make it again, and whoever is about to use it,
// write an input of it, or free one, comes here first: before_use and before_free of the core's watcher. In an iteration
// that departs from its schedule, what is dropped is made again when it is needed.
//
// Nothing here outlives an iteration: at its end, all that is still dropped is made again, and all calls are forgotten.
#pragma once

#include <c10/core/Storage.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <utility>
#include <vector>

#include "adapter.h"
#include "kept_call.h"
#include "live_watch.h"

namespace ooc_torch __attribute__((visibility("hidden"))) {

inline std::atomic<bool> recomputing{false};  // calls may have to be kept, or memory to be told of

// What a call allocates while it is kept, or runs again. In the latter case memory that is there already is given out for
// results that belong in it.
class CallMemory {
 public:
  // Of the calling thread.
  static CallMemory* current() { return current_; }
  // For a call that runs for the first time.
  CallMemory() : outer_(std::exchange(current_, this)) {}
  // For one that runs again: `places` has an address for each of its allocations, or null.
  CallMemory(const std::vector<Allocation>& first, std::vector<char*> places)
      : outer_(std::exchange(current_, this)), first_(&first), places_(std::move(places)) {}
  ~CallMemory() { current_ = outer_; }
  CallMemory(const CallMemory&) = delete;
  CallMemory& operator=(const CallMemory&) = delete;

  // The memory for the call's next allocation; null: it is allocated as always.
  void* place_for(size_t bytes) {
    const size_t index = count_++;
    in_step_ &= first_ == nullptr || (index < first_->size() && (*first_)[index].bytes == bytes);
    return first_ != nullptr && in_step_ ? places_[index] : nullptr;
  }
  bool gave(const void* address) const { return std::find(places_.begin(), places_.end(), address) != places_.end(); }
  bool repeats() const { return first_ != nullptr; }
  void allocated(size_t bytes, void* address) { made_.push_back({bytes, static_cast<char*>(address)}); }
  std::vector<Allocation> take() { return std::move(made_); }

 private:
  static inline thread_local CallMemory* current_ = nullptr;
  const AllocationsWatched watched_;
  CallMemory* outer_;
  const std::vector<Allocation>* first_ = nullptr;
  std::vector<char*> places_;
  std::vector<Allocation> made_;
  size_t count_ = 0;
  bool in_step_ = true;
};

// Keeps the call of a function that has begun, if it was found then that it may run again.
class Keeping {
 public:
  Keeping(const c10::OperatorHandle& op, const OperatorInfo& info, c10::DispatchKeySet keys, const torch::jit::Stack& stack) {
    if (__builtin_expect(recomputing.load(std::memory_order_relaxed), false)) begin(op, info, keys, stack);
  }
  Keeping(const Keeping&) = delete;
  Keeping& operator=(const Keeping&) = delete;
  // The kernel has returned; its results are on the stack, and the function has not ended.
  void end(const torch::jit::Stack& stack) {
    if (__builtin_expect(memory_ != nullptr, false)) finish(stack);
  }

 private:
  void begin(const c10::OperatorHandle& op, const OperatorInfo& info, c10::DispatchKeySet keys, const torch::jit::Stack& stack);
  void finish(const torch::jit::Stack& stack);

  std::shared_ptr<KeptCall> call_;
  std::unique_ptr<CallMemory> memory_;
  uint64_t iteration_ = 0;
  uint32_t position_ = 0;
};

// Whether a storage's memory is one of the core's variables, all of it, and goes when the storage does.
bool is_variable(const c10::Storage& storage);

// A function whose begin was announced did not begin.
void function_did_not_begin();

}  // namespace ooc_torch
