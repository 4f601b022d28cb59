// The driver calls that the library exports, declared from the one list in driver.h: a definition whose parameters differ
// does not compile. They are defined in
// exports_*.cpp.
#pragma once

#include "device.h"

namespace ooc {

using emulated::Call;
using emulated::Command;
using emulated::Device;
using emulated::Faults;
using emulated::Link;
using emulated::Needs;
using emulated::perform;
using Guard = std::lock_guard<std::mutex>;

#define OOC_EMULATED_DECLARE(need, member, symbol, parameters) \
  extern "C" __attribute__((visibility("default"))) CUresult symbol parameters;
OOC_DRIVER_CALLS(OOC_EMULATED_DECLARE)
#undef OOC_EMULATED_DECLARE

}  // namespace ooc
