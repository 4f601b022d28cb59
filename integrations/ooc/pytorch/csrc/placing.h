// The result of a part, made where it belongs in the whole result, so that nobody copies it there.
//
// Which of a part's allocations became its result is remembered, and when a part is called alike, memory in the whole result
// is given out for that one. The caller compares addresses afterwards; where the kernel allocated otherwise, the result is
// copied as ever.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/alignment.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "call_memory.h"
#include "operands.h"

namespace ooc_torch __attribute__((visibility("hidden"))) {

class Placing {
 public:
  // Of the calling thread, innermost; null: none.
  static Placing* current() { return allocations_watched() ? current_.get() : nullptr; }
  // `alike` is the same for calls that allocate alike, as far as one knows. Returns false, and does nothing, if no result
  // can lie in the target.
  static bool begin(const at::Tensor& target, int64_t alike) {
    if (!target.is_non_overlapping_and_dense() || reinterpret_cast<uintptr_t>(target.const_data_ptr()) % c10::gAlignment != 0) return false;
    current_ = std::unique_ptr<Placing>(new Placing(target, alike, known(alike), std::move(current_)));
    return true;
  }
  // Returns whether the result lies in the target. If not, it may be the next time.
  static bool end(const at::Tensor& result) {
    const std::unique_ptr<Placing> ended = take();
    if (result.const_data_ptr() == ended->address_) return true;
    ended->remember(result);
    return false;
  }
  // After an error.
  static void give_up() { take(); }

  // A function that begins may write the target, if it is known which allocation that is for.
  void add_operand(Operands& operands) const {
    if (memory_.gave(address_) && owned(address_)) operands.push_back({address_, OOC_READ | OOC_WRITE, 0, bytes_});
  }
  // What all functions of the part allocate.
  CallMemory* memory() { return &memory_; }

 private:
  // What was allocated up to the result, which is the last one; empty where that is not known.
  using Order = std::vector<Allocation>;
  struct Orders {
    std::mutex mutex;
    std::unordered_map<int64_t, Order> of;
  };
  static constexpr size_t kMostKnown = 4096;

  // The innermost, which is current no more.
  static std::unique_ptr<Placing> take() {
    TORCH_CHECK(current_ != nullptr, "no result is being placed in this thread");
    std::unique_ptr<Placing> ended = std::move(current_);
    current_ = std::move(ended->outer_);
    return ended;
  }
  static Orders& orders() {
    static auto* orders = new Orders;
    return *orders;
  }
  static Order known(int64_t alike) {
    const std::lock_guard<std::mutex> lock(orders().mutex);
    const auto found = orders().of.find(alike);
    return found != orders().of.end() ? found->second : Order{};
  }
  Placing(const at::Tensor& target, int64_t alike, const Order& known, std::unique_ptr<Placing> outer)
      : target_(target), address_(static_cast<char*>(target.mutable_data_ptr())), bytes_(target.nbytes()), alike_(alike),
        outer_(std::move(outer)), memory_(known, places(known)) {}
  std::vector<char*> places(const Order& known) const {
    std::vector<char*> places(known.size(), nullptr);
    if (!known.empty() && known.back().bytes == bytes_) places.back() = address_;
    return places;
  }
  void remember(const at::Tensor& result) const {
    const Order& made = memory_.made();
    const auto lies_there = [&](const Allocation& one) { return one.address == result.const_data_ptr() && one.bytes == bytes_; };
    // Of equal addresses the last one: those before it were freed again.
    const auto last = std::find_if(made.rbegin(), made.rend(), lies_there);
    const std::lock_guard<std::mutex> lock(orders().mutex);
    if (orders().of.size() >= kMostKnown) orders().of.clear();
    orders().of[alike_] = Order(made.begin(), last.base());
  }

  static inline thread_local std::unique_ptr<Placing> current_;
  const at::Tensor target_;
  char* const address_;
  const size_t bytes_;
  const int64_t alike_;
  std::unique_ptr<Placing> outer_;
  CallMemory memory_;
};

}  // namespace ooc_torch
