// The result of a part, made where it belongs in the whole result, so that nobody copies it there.
//
// No kernel is told where its result is to lie. But a kernel that is called alike allocates alike: which of its allocations
// became the result is remembered, and when it is called again, memory in the whole result is given out for that one. The
// caller compares addresses afterwards; where the kernel allocated otherwise, the result is copied as ever.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/alignment.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "live_watch.h"
#include "operands.h"

namespace ooc_torch __attribute__((visibility("hidden"))) {

class Placing {
 public:
  // Of the calling thread, innermost; null: none.
  static Placing* current() { return current_.get(); }
  // `alike` is the same for calls that allocate alike, as far as one knows. Returns false, and does nothing, if no result
  // can lie in the target.
  static bool begin(const at::Tensor& target, int64_t alike) {
    if (!target.is_non_overlapping_and_dense() || reinterpret_cast<uintptr_t>(target.const_data_ptr()) % c10::gAlignment != 0) return false;
    current_ = std::unique_ptr<Placing>(new Placing(target, alike, std::move(current_)));
    return true;
  }
  // Returns whether the result lies in the target. If not, it may be the next time.
  static bool end(const at::Tensor& result) {
    const std::unique_ptr<Placing> ended = take();
    if (ended->placed_) return result.const_data_ptr() == ended->address_;
    ended->remember(result);
    return false;
  }
  // After an error.
  static void give_up() { take(); }

  // A function that begins may write the target, if it is known which allocation that is for.
  void add_operand(Operands& operands) const {
    if (known_.result != SIZE_MAX && owned(address_)) operands.push_back({address_, OOC_READ | OOC_WRITE, 0, bytes_});
  }
  // While such a function runs, its thread's allocations are looked at.
  class InFunction {
   public:
    explicit InFunction(Placing* placing) : placing_(placing) { set(true); }
    ~InFunction() { set(false); }
    InFunction(const InFunction&) = delete;
    InFunction& operator=(const InFunction&) = delete;

   private:
    void set(bool on) {
      if (placing_ != nullptr) placing_->in_function_ = on;
    }
    Placing* const placing_;
  };

  // The memory for the next allocation; null: it is allocated as always.
  void* place_for(size_t bytes) {
    if (!in_function_) return nullptr;
    const size_t index = count_++;
    in_step_ &= index < known_.bytes.size() && known_.bytes[index] == bytes;
    if (!in_step_ || placed_ || index != known_.result || bytes != bytes_) return nullptr;
    placed_ = true;
    return address_;
  }
  bool gave(const void* address) const { return placed_ && address == address_; }
  void allocated(size_t bytes, void* address) {
    if (in_function_) made_.push_back({bytes, address});
  }

 private:
  struct Order {
    std::vector<size_t> bytes;  // of the allocations up to the result
    size_t result = SIZE_MAX;   // which of them it is
  };
  struct Orders {
    std::mutex mutex;
    std::unordered_map<int64_t, Order> of;
  };
  struct Block {
    size_t bytes;
    const void* address;
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
  Placing(const at::Tensor& target, int64_t alike, std::unique_ptr<Placing> outer)
      : target_(target), address_(static_cast<char*>(target.mutable_data_ptr())), bytes_(target.nbytes()), alike_(alike), outer_(std::move(outer)) {
    const std::lock_guard<std::mutex> lock(orders().mutex);
    if (const auto found = orders().of.find(alike); found != orders().of.end()) known_ = found->second;
  }
  void remember(const at::Tensor& result) const {
    if (made_.empty()) return;
    Order order;
    const auto lies_there = [&](const Block& block) { return block.address == result.const_data_ptr() && block.bytes == bytes_; };
    // Of equal addresses the last one: those before it were freed again.
    const auto last = std::find_if(made_.rbegin(), made_.rend(), lies_there);
    for (auto block = made_.begin(); block != last.base(); ++block) order.bytes.push_back(block->bytes);
    if (last != made_.rend()) order.result = order.bytes.size() - 1;
    const std::lock_guard<std::mutex> lock(orders().mutex);
    if (orders().of.size() >= kMostKnown) orders().of.clear();
    orders().of[alike_] = std::move(order);
  }

  static inline thread_local std::unique_ptr<Placing> current_;
  const AllocationsWatched watched_;
  const at::Tensor target_;
  char* const address_;
  const size_t bytes_;
  const int64_t alike_;
  std::unique_ptr<Placing> outer_;
  Order known_;
  std::vector<Block> made_;
  size_t count_ = 0;
  bool in_function_ = false, in_step_ = true, placed_ = false;
};

}  // namespace ooc_torch
