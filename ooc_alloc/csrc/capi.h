// What the files of the C interface share: the handle behind ooc_core, and where exceptions end.
#pragma once

#include <exception>
#include <new>

#include "core.h"
#include "last_error.h"
#include "ooc_alloc.h"
#include "own_memory.h"

// Made, and destroyed, with its scheduler (swapd/csrc/exports.cpp).
struct ooc_core {
  explicit ooc_core(const ooc_config& config) : core(config) {}
  ooc::Core core;
};

namespace ooc {

template <class Body>
int guarded(Body body) {
  try {
    return body();
  } catch (const std::bad_alloc&) {
    return no_host_memory();
  } catch (const std::exception& error) {
    try {
      return fail(OOC_INVALID, error.what());
    } catch (const std::bad_alloc&) {
      return no_host_memory();
    }
  }
}

// For calls that begin something: not without memory to finish it.
template <class Body>
int gated(Body body) {
  return own_memory::ready() ? guarded(body) : no_host_memory();
}

// What has begun when memory was gone has not begun.
template <class Body>
int begun(ooc_core* core, Body body) {
  return gated([&] {
    try {
      return body();
    } catch (...) {
      core->core.undo_begin();
      throw;
    }
  });
}

// For calls that give something else than a status: `otherwise`, if an exception ended them.
template <class Value, class Body>
Value guarded_or(Value otherwise, Body body) {
  Value value = otherwise;
  gated([&] {
    value = body();
    return static_cast<int>(OOC_OK);
  });
  return value;
}

template <class Body>
void guarded_void(Body body) {
  guarded([&] {
    body();
    return static_cast<int>(OOC_OK);
  });
}

}  // namespace ooc
