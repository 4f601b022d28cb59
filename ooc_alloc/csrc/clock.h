// The clock of every time that the core gives: seconds, monotonic.
#pragma once

#include <time.h>

namespace ooc {

inline double now_seconds() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

}  // namespace ooc
