// What happens to an operator that does not fit: it is tried again as ranges of its variables, then in parts by the
// operator that Python has for it (integrations/ooc/pytorch/splitting), then on host memory. What worked is remembered by
// operator and shapes, so that the next time, and every later iteration, goes there at once.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/util/Exception.h>
#include <c10/util/SmallVector.h>

#include <atomic>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "thread_modes.h"

namespace ooc_torch __attribute__((visibility("hidden"))) {

struct OperatorInfo;

inline std::atomic<bool> splitting{false};       // the setting `split` is not off
inline std::atomic<bool> any_remembered{false};  // some operator did not fit so far

enum class Way : uint8_t { kWhole, kRanges, kParts, kHost };

// What splitting knows of one operator.
struct SplitState {
  std::vector<uint32_t> fragile;  // arguments that a kernel may move out of the stack: all but tensors and numbers
  bool writes = false;            // it writes some argument, beside these:
  std::vector<uint32_t> outs;     // arguments that it fills, whatever they held
  bool random = false;            // it draws random numbers
  uint32_t generator = UINT32_MAX;  // the argument that it may be given to draw from
  std::atomic<bool> any{false};   // something is remembered, or Python is to be asked
  std::atomic<bool> chosen{false};  // Python chooses a way for shapes of which nothing is remembered, also where they fit
  std::mutex mutex;
  std::unordered_map<uint64_t, Way> ways;  // by shapes
  bool asked = false;                      // Python was asked whether it can be split
  std::optional<c10::OperatorHandle> parts;
};

SplitState* new_split_state(const c10::OperatorHandle& op);

// A generator as it was before a kernel drew from it, so that the same numbers can be drawn again.
class KeptGenerator {
 public:
  void keep(const SplitState& state, const c10::IValue* arguments);
  void restore() const;

 private:
  at::Generator generator_, before_;
  uint64_t offset_ = 0;  // a GPU's generator is a seed and this
};

// Arguments, and the generator, as they were before a kernel ran, so that the operator can be called again. Only those that
// kernels may move from are copied, so a call that fits pays next to nothing.
class KeptArguments {
 public:
  KeptArguments(const SplitState& state, const torch::jit::Stack& stack, size_t count) : size_(stack.size()) {
    for (const uint32_t argument : state.fragile) {
      const size_t place = size_ - count + argument;
      if (!stack[place].isNone()) kept_.emplace_back(static_cast<uint32_t>(place), stack[place]);
    }
    if (state.random) generator_.keep(state, stack.data() + (size_ - count));
  }
  // Puts the stack right after an exception. Returns false if a kernel has taken arguments off the stack.
  bool restore(torch::jit::Stack& stack) const {
    if (stack.size() < size_) return false;
    stack.resize(size_);
    for (const auto& [place, value] : kept_) stack[place] = value;
    generator_.restore();
    return true;
  }

 private:
  size_t size_;
  c10::SmallVector<std::pair<uint32_t, c10::IValue>, 4> kept_;
  KeptGenerator generator_;
};

// Returns what was remembered of the arguments on the stack.
Way remembered_way(const OperatorInfo& info, const torch::jit::Stack& stack);

// Runs an operator in a way that is not kWhole.
void run_in_way(Way way, const c10::OperatorHandle& op, const OperatorInfo& info, c10::DispatchKeySet keys,
                torch::jit::Stack* stack);

// Called when an operator failed for want of memory, in its kernel if `began`, with its arguments on the stack. It leaves
// its results there, or throws `error` with the reason.
void recover(const c10::OperatorHandle& op, const OperatorInfo& info, c10::DispatchKeySet keys,
             torch::jit::Stack* stack, bool began, const c10::OutOfMemoryError& error);

// Python calls this to say why it cannot split the operator that it runs. `inexact`: it could if rounding did not matter.
// `raised`: the parts raise an error, which is thrown again if the operator cannot run in any other way.
void cannot_split(std::string reason, bool inexact, bool raised);
// Python calls one of these instead where the operator that it is asked about had better run whole, or on host memory this
// time; or it asks whether that was tried, in vain.
void run_whole();
void run_on_host();
bool whole_failed();
bool host_failed();
// From now on Python chooses the ways of an operator; what is remembered of it is forgotten.
void choose_ways(SplitState& state);

}  // namespace ooc_torch
