// The one emulated device of the process, and what every driver call does before its own work.
#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <new>
#include <string>

#include "address_space.h"
#include "calls.h"
#include "config.h"
#include "faults.h"
#include "host_memory.h"
#include "link.h"
#include "physical_memory.h"
#include "sites.h"
#include "streams.h"

namespace ooc::emulated {

class Device {
 public:
  // Never destroyed: streams may work until the process is gone.
  static Device& get();

  // Reads the environment unless configured before, and makes the memory. Repeating it after success does nothing.
  bool initialize(std::string& error);
  // Reads OOC_EMULATED_FAULTS and OOC_EMULATED_SITES, once, before cuInit begins: a rule may make cuInit fail.
  void read_faults();
  bool get_config(Config& config, std::string& error);
  bool set_config(const Config& config, std::string& error);

  std::mutex memory_mutex;  // guards the memory and its addresses
  std::unique_ptr<PhysicalMemory> memory;
  std::unique_ptr<AddressSpace> addresses;
  uint64_t granularity = 0;

  Link h2d, d2h{copy_from_device};
  Streams streams;
  HostMemory host;
  Faults faults;
  Sites sites;
  std::atomic<uint64_t> calls[kCallCount] = {};
  std::atomic<bool> is_initialized{false};
  std::atomic<bool> is_forked_child{false};  // the parent had initialised: no driver call works here
  std::atomic<int> context_users{0};         // cuDevicePrimaryCtxRetain less Release

 private:
  Device();
  bool configure_from_environment(std::string& error);
  void apply(const Config& config);
  std::array<std::mutex*, 7> mutexes() {
    return {&memory_mutex, &streams.mutex, &h2d.mutex, &d2h.mutex, &host.mutex, &faults.mutex, &sites.mutex};
  }

  bool is_configured_ = false;
  bool has_read_faults_ = false;
  std::string wrong_faults_;  // what was wrong with OOC_EMULATED_FAULTS; empty if nothing
};

// The context is one token: there is one device, and threads either have it current or have none.
CUcontext primary_context();
CUcontext& current_context();

// The message of the last control call (or cuInit) of this thread that failed.
std::string& last_error();

enum class Needs { kNothing, kDevice, kContext };

// Counts the call, and returns why it must fail before it starts, or CUDA_SUCCESS if it may go on.
CUresult enter(Call call, Needs needs, const void* return_address) noexcept;
// The same for calls that work in any state.
CUresult enter_always(Call call, const void* return_address) noexcept;

// Runs a driver call's body after enter(), and turns exceptions into results, as none may leave a C function. `site` is the
// place that called the exported function. The exported function has to call this itself, or pass its own `site` on, as a
// default argument is evaluated in the caller.
template <typename Body>
CUresult perform(Call call, Needs needs, Body&& body, const void* site = __builtin_return_address(0)) noexcept {
  const CUresult refusal = enter(call, needs, site);
  if (refusal != CUDA_SUCCESS) return refusal;
  const Faults::Cost cost;
  try {
    return body(Device::get());
  } catch (const std::bad_alloc&) {
    return CUDA_ERROR_OUT_OF_MEMORY;
  } catch (...) {
    return CUDA_ERROR_OPERATING_SYSTEM;
  }
}

// The same for a call that needs a context, as most do.
template <typename Body>
CUresult perform(Call call, Body&& body, const void* site = __builtin_return_address(0)) noexcept {
  return perform(call, Needs::kContext, body, site);
}

}  // namespace ooc::emulated
