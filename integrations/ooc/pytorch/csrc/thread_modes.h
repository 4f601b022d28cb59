// Modes of a thread in which operators are treated unlike elsewhere. Only splitting uses them. As long as nothing was ever
// split they cost one look at a flag.
#pragma once

#include <atomic>
#include <cstdint>

namespace ooc_torch __attribute__((visibility("hidden"))) {

enum : uint32_t {
  kRanges = 1,  // of a variable, a view uses only the ranges that it reaches
  kPlain = 2,   // memory comes from the host, and operators are no functions
  kUndivided = 4,  // operators run in one piece, on host memory where they do not fit
};

inline std::atomic<bool> modes_used{false};  // some thread has used a mode so far
inline thread_local uint32_t thread_modes = 0;

inline bool in_mode(uint32_t mode) {
  return __builtin_expect(modes_used.load(std::memory_order_relaxed), false) && (thread_modes & mode) != 0;
}

// Returns whether the mode was on.
inline bool set_mode(uint32_t mode, bool on) {
  const bool before = (thread_modes & mode) != 0;
  if (on) modes_used.store(true, std::memory_order_relaxed);
  thread_modes = on ? thread_modes | mode : thread_modes & ~mode;
  return before;
}

class ModeGuard {
 public:
  explicit ModeGuard(uint32_t mode, bool on = true) : mode_(mode), before_(set_mode(mode, on)) {}
  ~ModeGuard() { set_mode(mode_, before_); }
  ModeGuard(const ModeGuard&) = delete;
  ModeGuard& operator=(const ModeGuard&) = delete;

 private:
  uint32_t mode_;
  bool before_;
};

}  // namespace ooc_torch
