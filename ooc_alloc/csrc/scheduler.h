// What the core asks of whoever plans ahead. Every method is called with the core's lock held and must not block.
#pragma once

#include <cstdint>
#include <memory>

#include "recorder.h"

namespace ooc {

class Scheduler {
 public:
  virtual ~Scheduler() = default;
  // Function `index` of the iteration is about to run; `prefix` is the fingerprint of the sequence up to and with it.
  virtual void function_started(uint32_t index, uint64_t prefix) = 0;
  // The iteration ended. Returns true if it followed one plan from its start to its end.
  virtual bool iteration_ended(const std::shared_ptr<Trace>& ended) = 0;
  // Chunks are going to be free without anybody's help: a planned swap-out is under way or may start now.
  virtual bool relief_coming() const = 0;
  // Index of the next function that uses the region (past the last function: in the next iteration); kNever or
  // kUnknown.
  virtual uint64_t next_use(const Region* region) const = 0;
  // A move may start when the function that ended last is done: its end on its stream is worth an event.
  virtual bool waits_for_last_function() const = 0;
  static constexpr uint64_t kNever = ~uint64_t{0};
  static constexpr uint64_t kUnknown = kNever - 1;
};

}  // namespace ooc
