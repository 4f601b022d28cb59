// Plain host memory in place of an allocation: for a function that only reads and does not fit, which is run to its end
// so that the error can name what it needs (its results are dropped), and for a child after a fork.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <unordered_map>

namespace ooc {

class StandIns {
 public:
  StandIns() = default;
  ~StandIns() {
    for (const auto& block : blocks_) ::free(block.first);
  }
  StandIns(const StandIns&) = delete;
  StandIns& operator=(const StandIns&) = delete;

  // Whether functions are measured so. Any thread.
  bool on() const { return on_; }
  void set_on(bool on) { on_ = on; }

  // Returns null if the system has no memory.
  void* allocate(uint64_t bytes) {
    void* block = nullptr;
    if (posix_memalign(&block, 64, bytes) != 0) return nullptr;
    blocks_[block] = bytes;
    return block;
  }
  // Returns the bytes of the block, or 0 if there is none at the address.
  uint64_t free(void* address) {
    const auto block = blocks_.find(address);
    if (block == blocks_.end()) return 0;
    const uint64_t bytes = block->second;
    blocks_.erase(block);
    ::free(address);
    return bytes;
  }

 private:
  std::atomic<bool> on_{true};
  std::unordered_map<void*, uint64_t> blocks_;
};

}  // namespace ooc
