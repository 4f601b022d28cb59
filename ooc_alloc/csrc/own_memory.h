// Memory for our own books, with a reserve. Where the system gives none, what has begun is finished from the reserve: an
// operation that stops half way would leave books that lie. Until the reserve is whole again, nothing new begins
// (capi.cpp), and that is said.
//
// The library's operator new and delete are its own (exports.map); a program's are not touched. Strings are allocated by
// libstdc++, which does not know of the reserve.
#pragma once

#include <atomic>

namespace ooc::own_memory {

inline std::atomic<bool> whole{false};

// Makes the reserve whole again, if there is memory for it.
[[gnu::cold]] bool refill() noexcept;
// Whether something new may begin.
inline bool ready() noexcept { return __builtin_expect(whole.load(std::memory_order_relaxed), true) || refill(); }

// Held across a fork, so that the child can free.
void before_fork() noexcept;
void after_fork() noexcept;

}  // namespace ooc::own_memory
