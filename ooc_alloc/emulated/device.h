// The one emulated device of the process, and what every driver call does before its own work.
#pragma once

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
  // OOC_EMULATED_FAULTS and OOC_EMULATED_SITES, once; before cuInit, which may be the call that fails.
  void read_faults();
  bool get_config(Config& config, std::string& error);
  bool set_config(const Config& config, std::string& error);

  std::mutex memory_mutex;  // guards the memory and its addresses
  std::unique_ptr<PhysicalMemory> memory;
  std::unique_ptr<AddressSpace> addresses;
  uint64_t granularity = 0;

  Link h2d, d2h;
  Streams streams;
  HostMemory host;
  Faults faults;
  Sites sites;
  std::atomic<uint64_t> calls[kCallCount] = {};
  std::atomic<bool> is_initialized{false};
  std::atomic<bool> is_forked_child{false};  // of a process that had initialised: nothing works here any more
  std::atomic<int> context_users{0};         // cuDevicePrimaryCtxRetain less Release

 private:
  Device();
  bool configure_from_environment(std::string& error);
  void apply(const Config& config);
  void lock_all();
  void unlock_all();

  bool is_configured_ = false;
  bool has_read_faults_ = false;
  std::string wrong_faults_;  // what was wrong about them
};

// The context is one token: there is one device, and threads either have it current or have none.
CUcontext primary_context();
CUcontext& current_context();

// The message of the last control call (or cuInit) of this thread that failed.
std::string& last_error();

enum class Needs { kNothing, kDevice, kContext };

// Counts the call and says why it must fail before it starts; CUDA_SUCCESS to go on.
CUresult enter(Call call, Needs needs, const void* return_address) noexcept;
// The same for calls that work in any state.
CUresult enter_always(Call call, const void* return_address) noexcept;

// Runs a driver call's body between enter() and a net for exceptions, which must not leave a C function. `site` is where the
// exported function, which this must be called from, was called: a default argument belongs to the caller.
template <typename Body>
CUresult perform(Call call, Needs needs, Body&& body, const void* site = __builtin_return_address(0)) noexcept {
  const CUresult refusal = enter(call, needs, site);
  if (refusal != CUDA_SUCCESS) return refusal;
  try {
    return body(Device::get());
  } catch (const std::bad_alloc&) {
    return CUDA_ERROR_OUT_OF_MEMORY;
  } catch (...) {
    return CUDA_ERROR_OPERATING_SYSTEM;
  }
}

}  // namespace ooc::emulated
