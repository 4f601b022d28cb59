// Recomputation: bytes that are given up and made again, as schedules say, or wherever it is possible (a test of it all).
//
// Calls that may run again are kept (kept_call.h), and a history knows which bytes they read and wrote (history.h). A schedule
// is never trusted: a variable is only dropped if the history knows how to make it again, and whoever is about to use it,
// write an input of it, or free one, comes here first: before_use and before_free of the core's watcher. In an iteration
// that departs from its schedule, what is dropped is made again when it is needed. What a schedule lets linger is not freed when
// the program frees it, but once the last function has begun before which something is made again from it.
//
// Nothing here outlives an iteration, or a budget that is lowered: then all that is still dropped is made again, and all calls
// are forgotten.
#pragma once

#include <c10/core/Storage.h>

#include <atomic>
#include <memory>
#include <optional>
#include <vector>

#include "adapter.h"
#include "kept_call.h"

namespace ooc_torch __attribute__((visibility("hidden"))) {

inline std::atomic<bool> recomputing{false};  // calls may have to be kept, or memory to be told of

// Keeps the call of a function that has begun, if it was found then that it may run again. A function on host memory may
// not: it has more operands than fit.
class Keeping {
 public:
  Keeping(const c10::OperatorHandle& op, const OperatorInfo& info, c10::DispatchKeySet keys, const torch::jit::Stack& stack,
          bool on_host) {
    if (__builtin_expect(recomputing.load(std::memory_order_relaxed), false)) begin(op, info, keys, stack, on_host);
  }
  Keeping(const Keeping&) = delete;
  Keeping& operator=(const Keeping&) = delete;
  // The kernel has returned; its results are on the stack, and the function has not ended.
  void end(const torch::jit::Stack& stack) {
    if (__builtin_expect(memory_ != nullptr, false)) finish(stack);
  }

 private:
  void begin(const c10::OperatorHandle& op, const OperatorInfo& info, c10::DispatchKeySet keys, const torch::jit::Stack& stack,
             bool on_host);
  void finish(const torch::jit::Stack& stack);

  std::shared_ptr<KeptCall> call_;
  std::unique_ptr<CallMemory> memory_;
  std::optional<CallMemory::During> during_;
  uint64_t iteration_ = 0;
  uint32_t position_ = 0;
};

// Whether a storage's memory is one of the core's variables, all of it, and goes when the storage does.
bool is_variable(const c10::Storage& storage);

// Everything that is dropped is made again, and all kept calls are forgotten.
void forget_iteration();

// A function whose begin was announced did not begin.
void function_did_not_begin();

}  // namespace ooc_torch
