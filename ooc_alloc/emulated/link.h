// One direction of the bus between host and device: a resource that all copies of that direction share.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <mutex>

#include "config.h"

namespace ooc::emulated {

using TimePoint = std::chrono::steady_clock::time_point;

struct LinkStats {
  uint64_t bytes = 0;
  uint64_t copies = 0;
  double busy_seconds = 0;
};

// A copy takes latency + bytes / bandwidth of the link's time, from when it is ready and the link is free. It is done in
// pieces, between which copies of other streams get their turn.
//
// The link keeps a clock of its own: a copy starts when it was enqueued, or when the one before ended on that clock, and not
// when a thread woke up to notice. So the next copies make up for time that the operating system's scheduler takes from the
// copying thread; a device loses no such time. The clock is never behind the copying by more than kCatchUp, so the times
// show it if the host cannot copy as fast as the link. No copy ends sooner than latency + bytes / bandwidth after it was
// enqueued.
class Link {
 public:
  void configure(const LinkConfig& config);
  LinkConfig config() const;

  // Copies and sleeps until the copy's time is over; returns that time. `ready`: when the copy could have started.
  TimePoint copy(void* target, const void* source, size_t bytes, TimePoint ready);

  LinkStats stats() const;
  void reset_stats();

  mutable std::mutex mutex;  // public for the fork handlers; guards everything below

 private:
  TimePoint take(TimePoint earliest, double seconds);

  LinkConfig config_;
  TimePoint free_at_{};
  LinkStats stats_;
};

constexpr std::chrono::milliseconds kCatchUp{20};

}  // namespace ooc::emulated
