// What the files of the C interface share: the handle behind ooc_core, and where exceptions end.
#pragma once

#include <exception>
#include <new>
#include <type_traits>

#include "core.h"
#include "last_error.h"
#include "ooc_alloc.h"
#include "own_memory.h"

// Made, and destroyed, with its scheduler (swapd/csrc/exports.cpp).
struct ooc_core : ooc::Core {
  using Core::Core;
};

namespace ooc {

// What a call gives that an exception ended: its status, or nothing.
template <class Value>
Value refused(int status) {
  if constexpr (std::is_same_v<Value, int>) return status;
  else return Value();
}

// The status for the exception that is being handled.
[[gnu::cold, gnu::noinline]] inline int status_of_exception() {
  try {
    throw;
  } catch (const std::bad_alloc&) {
    return no_host_memory();
  } catch (const std::exception& error) {
    const auto* failure = dynamic_cast<const Failure*>(&error);
    try {
      return fail(failure != nullptr ? failure->status : OOC_INVALID, error.what());
    } catch (const std::bad_alloc&) {
      return no_host_memory();
    }
  }
}

// Gives what `body` gives, and ends its exceptions. Inline, like the others, so that arguments stay in registers.
template <class Body>
[[gnu::always_inline]] inline auto guarded(const Body& body) {
  try {
    return body();
  } catch (...) {
    return refused<decltype(body())>(status_of_exception());
  }
}

// For calls that begin something: not without memory to finish it.
template <class Body>
[[gnu::always_inline]] inline auto gated(const Body& body) {
  return own_memory::ready() ? guarded(body) : refused<decltype(body())>(no_host_memory());
}

// Guards a method of the core's likewise.
template <class Method, class... Arguments>
[[gnu::always_inline]] inline auto guarded(ooc_core* core, Method method, Arguments... arguments) {
  return guarded([&]() __attribute__((always_inline)) { return (core->*method)(arguments...); });
}
template <class Method, class... Arguments>
[[gnu::always_inline]] inline auto gated(ooc_core* core, Method method, Arguments... arguments) {
  return gated([&]() __attribute__((always_inline)) { return (core->*method)(arguments...); });
}

// What has begun when memory was gone has not begun.
template <class Method, class... Arguments>
[[gnu::always_inline]] inline int begun(ooc_core* core, Method method, Arguments... arguments) {
  if (!own_memory::ready()) return no_host_memory();
  try {
    return (core->*method)(arguments...);
  } catch (...) {
    core->undo_begin();
    return status_of_exception();
  }
}

}  // namespace ooc
