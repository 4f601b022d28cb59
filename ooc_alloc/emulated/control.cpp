// The control interface, declared in emulated_control.h.
#include "emulated_control.h"

#include <exception>

#include "device.h"

namespace ooc::emulated {
namespace {

using Guard = std::lock_guard<std::mutex>;

// Runs a control call. A `body` that fails returns false and sets the error, or throws.
template <typename Body>
int control(Body&& body) noexcept {
  try {
    std::string& error = last_error();
    error.clear();
    if (Device::get().is_forked_child) {
      error = "the emulated device does not exist in a forked child";
      return -1;
    }
    return body(Device::get(), error) ? 0 : -1;
  } catch (const std::exception& exception) {
    last_error() = exception.what();
    return -1;
  }
}

void fill_memory_stats(Device& device, ooc_emulated_stats& stats) {
  const Guard lock(device.memory_mutex);
  if (device.memory == nullptr) return;
  stats.physical_bytes = device.memory->used_bytes();
  stats.physical_peak_bytes = device.memory->peak_bytes();
  stats.allocations = device.memory->allocations();
  stats.host_bytes = device.memory->host_bytes();
  stats.mappings = device.addresses->mappings();
  stats.reservations = device.addresses->reservations();
}

}  // namespace

extern "C" {

#define OOC_EMULATED_API __attribute__((visibility("default")))

OOC_EMULATED_API int ooc_emulated_get_config(ooc_emulated_config* config) {
  return control([=](Device& device, std::string& error) {
    if (config == nullptr || config->struct_bytes != sizeof(*config)) {
      error = "struct_bytes is not the size of ooc_emulated_config: header and library do not belong together";
      return false;
    }
    Config current;
    if (!device.get_config(current, error)) return false;
    *config = {sizeof(*config),
               0,
               current.memory_bytes,
               current.granularity_bytes,
               current.h2d.bytes_per_second,
               current.d2h.bytes_per_second,
               current.h2d.latency_seconds,
               current.d2h.latency_seconds};
    return true;
  });
}

OOC_EMULATED_API int ooc_emulated_set_config(const ooc_emulated_config* config) {
  return control([=](Device& device, std::string& error) {
    if (config == nullptr || config->struct_bytes != sizeof(*config)) {
      error = "struct_bytes is not the size of ooc_emulated_config: header and library do not belong together";
      return false;
    }
    return device.set_config({config->memory_bytes,
                              config->granularity_bytes,
                              {config->h2d_bytes_per_second, config->h2d_latency_seconds},
                              {config->d2h_bytes_per_second, config->d2h_latency_seconds}},
                             error);
  });
}

OOC_EMULATED_API const char* ooc_emulated_error(void) { return last_error().c_str(); }

OOC_EMULATED_API int ooc_emulated_get_stats(ooc_emulated_stats* stats) {
  return control([=](Device& device, std::string& error) {
    if (stats == nullptr || stats->struct_bytes != sizeof(*stats)) {
      error = "struct_bytes is not the size of ooc_emulated_stats: header and library do not belong together";
      return false;
    }
    *stats = {};
    stats->struct_bytes = sizeof(*stats);
    fill_memory_stats(device, *stats);
    const LinkStats h2d = device.h2d.stats();
    const LinkStats d2h = device.d2h.stats();
    stats->h2d_bytes = h2d.bytes;
    stats->d2h_bytes = d2h.bytes;
    stats->h2d_copies = h2d.copies;
    stats->d2h_copies = d2h.copies;
    stats->h2d_busy_seconds = h2d.busy_seconds;
    stats->d2h_busy_seconds = d2h.busy_seconds;
    stats->injected_faults = device.faults.injected();
    return true;
  });
}

OOC_EMULATED_API void ooc_emulated_reset_stats(void) {
  (void)control([](Device& device, std::string&) {
    for (auto& count : device.calls) count.store(0, std::memory_order_relaxed);
    device.faults.reset_stats();
    device.h2d.reset_stats();
    device.d2h.reset_stats();
    const Guard lock(device.memory_mutex);
    if (device.memory != nullptr) device.memory->reset_peak();
    return true;
  });
}

OOC_EMULATED_API uint64_t ooc_emulated_call_count(const char* name) {
  Call call{};
  if (name == nullptr || !find_call(name, call)) return UINT64_MAX;
  return Device::get().calls[static_cast<size_t>(call)].load(std::memory_order_relaxed);
}

OOC_EMULATED_API int ooc_emulated_inject_faults(const char* rules) {
  return control([=](Device& device, std::string& error) { return device.faults.add(rules != nullptr ? rules : "", error); });
}

OOC_EMULATED_API void ooc_emulated_clear_faults(void) {
  (void)control([](Device& device, std::string&) {
    device.faults.clear();
    return true;
  });
}

OOC_EMULATED_API void ooc_emulated_watch_sites(void) { Device::get().sites.watch(); }

OOC_EMULATED_API const char* ooc_emulated_sites(void) {
  thread_local std::string text;
  text = Device::get().sites.list();
  return text.c_str();
}

OOC_EMULATED_API void ooc_emulated_synchronize(void) { Device::get().streams.synchronize_all(); }

OOC_EMULATED_API int ooc_emulated_access(const void* address, uint64_t bytes) {
  Device& device = Device::get();
  const Guard lock(device.memory_mutex);
  return device.addresses == nullptr ? -1 : device.addresses->access(reinterpret_cast<uint64_t>(address), bytes);
}

OOC_EMULATED_API int64_t ooc_emulated_physical_offset(const void* address) {
  Device& device = Device::get();
  const Guard lock(device.memory_mutex);
  return device.addresses == nullptr ? -1 : device.addresses->physical_offset(reinterpret_cast<uint64_t>(address));
}

}  // extern "C"
}  // namespace ooc::emulated
