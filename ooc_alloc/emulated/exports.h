// The driver calls that the library exports, declared from the one list in driver.h: a definition whose parameters differ
// does not compile. They are defined in exports_*.cpp.
#pragma once

#include "device.h"

namespace ooc {

#define OOC_EMULATED_DECLARE(need, member, symbol, parameters) \
  extern "C" __attribute__((visibility("default"))) CUresult symbol parameters;
OOC_DRIVER_CALLS(OOC_EMULATED_DECLARE)
#undef OOC_EMULATED_DECLARE

}  // namespace ooc
