// What the files of the C interface share: the handle behind ooc_core, and where exceptions end.
#pragma once

#include <exception>
#include <functional>
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

// Gives what `body` gives, and ends its exceptions.
template <class Body>
auto guarded(Body body) {
  using Value = decltype(body());
  try {
    return body();
  } catch (const std::bad_alloc&) {
    return refused<Value>(no_host_memory());
  } catch (const std::exception& error) {
    const auto* failure = dynamic_cast<const Failure*>(&error);
    try {
      return refused<Value>(fail(failure != nullptr ? failure->status : OOC_INVALID, error.what()));
    } catch (const std::bad_alloc&) {
      return refused<Value>(no_host_memory());
    }
  }
}

// For calls that begin something: not without memory to finish it.
template <class Body>
auto gated(Body body) {
  return own_memory::ready() ? guarded(body) : refused<decltype(body())>(no_host_memory());
}

// The same for a method of the core's.
template <class Method, class... Arguments>
auto guarded(ooc_core* core, Method method, Arguments... arguments) {
  return guarded([&] { return std::invoke(method, *core, arguments...); });
}
template <class Method, class... Arguments>
auto gated(ooc_core* core, Method method, Arguments... arguments) {
  return gated([&] { return std::invoke(method, *core, arguments...); });
}

// What has begun when memory was gone has not begun.
template <class Method, class... Arguments>
int begun(ooc_core* core, Method method, Arguments... arguments) {
  return gated([&] {
    try {
      return std::invoke(method, *core, arguments...);
    } catch (...) {
      core->undo_begin();
      throw;
    }
  });
}

}  // namespace ooc
