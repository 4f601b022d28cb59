// One direction of the bus between host and device: a resource that all copies of that direction share.
#pragma once

#include <time.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <mutex>

#include "config.h"

namespace ooc::emulated {

using std::chrono::steady_clock;
using TimePoint = steady_clock::time_point;

// steady_clock is CLOCK_MONOTONIC; an absolute time does not drift when a signal interrupts.
inline void sleep_until(TimePoint time) {
  const auto since_start = time.time_since_epoch();
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(since_start);
  const auto rest = std::chrono::duration_cast<std::chrono::nanoseconds>(since_start - seconds);
  const timespec target{static_cast<time_t>(seconds.count()), static_cast<long>(rest.count())};
  while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &target, nullptr) == EINTR) {
  }
}

struct LinkStats {
  uint64_t bytes = 0;
  uint64_t copies = 0;
  double busy_seconds = 0;
};

// Where a copy from the device reads, functions may write: a copy that is for nothing then. By this name the thread sanitizer
// knows such reads (tests/native/tsan_suppressions.txt).
[[gnu::noinline]] inline void* copy_from_device(void* target, const void* source, size_t bytes) {
  return std::memcpy(target, source, bytes);
}

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
  using CopyBytes = void* (*)(void* target, const void* source, size_t bytes);

  explicit Link(CopyBytes copy_bytes = std::memcpy) : copy_bytes_(copy_bytes) {}
  void configure(const LinkConfig& config) {
    const std::lock_guard<std::mutex> lock(mutex);
    config_ = config;
  }
  LinkConfig config() const {
    const std::lock_guard<std::mutex> lock(mutex);
    return config_;
  }

  // Copies and sleeps until the copy's time is over; returns that time. `ready`: when the copy could have started.
  TimePoint copy(void* target, const void* source, size_t bytes, TimePoint ready) {
    std::unique_lock<std::mutex> lock(mutex);
    const LinkConfig config = config_;
    stats_.copies += 1;
    stats_.bytes += bytes;
    if (config.bytes_per_second <= 0 && config.latency_seconds <= 0) {
      lock.unlock();
      copy_bytes_(target, source, bytes);
      return steady_clock::now();
    }
    TimePoint end = take(std::max(ready, steady_clock::now() - kCatchUp), config.latency_seconds);
    for (size_t done = 0; done < bytes;) {
      const size_t piece = std::min(kPieceBytes, bytes - done);
      if (config.bytes_per_second > 0) end = take(end, static_cast<double>(piece) / config.bytes_per_second);
      lock.unlock();
      copy_bytes_(static_cast<char*>(target) + done, static_cast<const char*>(source) + done, piece);
      sleep_until(end);
      lock.lock();
      done += piece;
    }
    end = std::max(end, steady_clock::now() - kCatchUp);
    free_at_ = std::max(free_at_, end);
    return end;
  }

  LinkStats stats() const {
    const std::lock_guard<std::mutex> lock(mutex);
    return stats_;
  }
  void reset_stats() {
    const std::lock_guard<std::mutex> lock(mutex);
    stats_ = LinkStats();
  }

  mutable std::mutex mutex;  // public for the fork handlers; guards everything below

 private:
  // Takes the link for `seconds`, from `earliest` or from when it is free, and returns the end. The caller holds the mutex.
  TimePoint take(TimePoint earliest, double seconds) {
    stats_.busy_seconds += seconds;
    // Rounded up: the end is never before bytes / bandwidth.
    const auto duration = std::chrono::nanoseconds(static_cast<int64_t>(seconds * 1e9) + 1);
    free_at_ = std::max(earliest, free_at_) + std::chrono::duration_cast<steady_clock::duration>(duration);
    return free_at_;
  }

  static constexpr size_t kPieceBytes = 1 << 20;
  static constexpr std::chrono::milliseconds kCatchUp{20};

  const CopyBytes copy_bytes_;
  LinkConfig config_;
  TimePoint free_at_{};
  LinkStats stats_;
};

}  // namespace ooc::emulated
