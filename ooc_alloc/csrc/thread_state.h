// What a core knows of a thread. The thread itself reads and writes it, mostly under the core's lock; what others read
// without the lock is atomic.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "driver.h"
#include "region.h"
#include "timeline.h"

namespace ooc {

// A value that other threads read without the lock. It is copied only while nobody else looks.
template <class Value>
class Shared {
 public:
  Shared(Value value = {}) : value_(value) {}
  Shared(const Shared& other) : value_(other.value_.load()) {}
  Shared& operator=(const Shared& other) { return *this = other.value_.load(); }
  Shared& operator=(Value next) {
    value_.store(next, std::memory_order_release);
    return *this;
  }
  operator Value() const { return value_.load(std::memory_order_acquire); }

 private:
  std::atomic<Value> value_;
};

// Functions are the program's own, no part of the sequence, or a part that makes again what the program made.
enum class Part : uint8_t { kProgram, kApart = OOC_APART, kRemakes = OOC_REMAKES };

// A function's pins outlast it until the thread's next function begins: results are touched without an operator just
// after they were made (torch.tensor(list), tolist, file reads).
struct alignas(64) ThreadState {  // as is Core
  std::vector<Hold> held;
  Shared<bool> in_function = false;
  bool exited = false;         // the thread is gone, the entry may be used again
  bool may_yield = false;      // beginning: nothing was computed yet, so its operands may be let go again
  bool yielded = false;        // they must be, as the functions of other threads need the room
  bool writes = false;         // the running function declared a write
  bool on_host = false;        // it may use host memory in place of device memory
  Part part = Part::kProgram;  // what its functions are, for the time being
  uint32_t function = 0;
  uint32_t stream = 0;         // of the running function, or of the last one
  CUstream stream_handle = nullptr;
  uint32_t operand_count = 0;  // first entries of held: operands; the others were allocated by the function
  uint64_t measured_chunks = 0;  // of allocations that did not fit, which the host serves to learn the need
  uint64_t measured_need = 0;    // the most chunks there were at once since the first of these; 0: all fitted
  uint32_t number = 0;         // 1, 2, ... in the timeline
  uint64_t event = Timeline::kNoEvent;  // of the running function, or of the last one
  Shared<double> ended = 0.0;  // when that ended; 0: it runs
};

// What a thread is for a core.
struct ThreadEntry {
  uint64_t core_id;
  ThreadState* state;
};
// The one used last. Constant and trivial, so that reading it asks nobody whether it was made.
inline thread_local ThreadEntry latest_entry{0, nullptr};

}  // namespace ooc
