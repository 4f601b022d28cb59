#include "link.h"

#include <time.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace ooc::emulated {
namespace {

constexpr size_t kPieceBytes = 1 << 20;

using std::chrono::steady_clock;

// steady_clock is CLOCK_MONOTONIC; an absolute time does not drift when a signal interrupts.
void sleep_until(TimePoint time) {
  const auto since_start = time.time_since_epoch();
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(since_start);
  const auto rest = std::chrono::duration_cast<std::chrono::nanoseconds>(since_start - seconds);
  const timespec target{static_cast<time_t>(seconds.count()), static_cast<long>(rest.count())};
  while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &target, nullptr) == EINTR) {
  }
}

}  // namespace

void Link::configure(const LinkConfig& config) {
  const std::lock_guard<std::mutex> lock(mutex);
  config_ = config;
}

LinkConfig Link::config() const {
  const std::lock_guard<std::mutex> lock(mutex);
  return config_;
}

LinkStats Link::stats() const {
  const std::lock_guard<std::mutex> lock(mutex);
  return stats_;
}

void Link::reset_stats() {
  const std::lock_guard<std::mutex> lock(mutex);
  stats_ = LinkStats();
}

// Takes the link for `seconds`, from `earliest` or from when it is free, and returns the end. The caller holds the mutex.
TimePoint Link::take(TimePoint earliest, double seconds) {
  stats_.busy_seconds += seconds;
  // Rounded up: the end is never before bytes / bandwidth.
  const auto duration = std::chrono::nanoseconds(static_cast<int64_t>(seconds * 1e9) + 1);
  free_at_ = std::max(earliest, free_at_) + std::chrono::duration_cast<steady_clock::duration>(duration);
  return free_at_;
}

TimePoint Link::copy(void* target, const void* source, size_t bytes, TimePoint ready) {
  std::unique_lock<std::mutex> lock(mutex);
  const LinkConfig config = config_;
  stats_.copies += 1;
  stats_.bytes += bytes;
  if (config.bytes_per_second <= 0 && config.latency_seconds <= 0) {
    lock.unlock();
    std::memcpy(target, source, bytes);
    return steady_clock::now();
  }
  TimePoint end = take(std::max(ready, steady_clock::now() - kCatchUp), config.latency_seconds);
  for (size_t done = 0; done < bytes;) {
    const size_t piece = std::min(kPieceBytes, bytes - done);
    if (config.bytes_per_second > 0) end = take(end, static_cast<double>(piece) / config.bytes_per_second);
    lock.unlock();
    std::memcpy(static_cast<char*>(target) + done, static_cast<const char*>(source) + done, piece);
    sleep_until(end);
    lock.lock();
    done += piece;
  }
  end = std::max(end, steady_clock::now() - kCatchUp);
  free_at_ = std::max(free_at_, end);
  return end;
}

}  // namespace ooc::emulated
