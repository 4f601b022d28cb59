#include "device.h"

#include <pthread.h>

#include <cstdlib>

namespace ooc::emulated {

Device& Device::get() {
  static Device& device = *new Device;
  return device;
}

// Every lock is held across a fork, so that in the child each lock is free and what it guards is consistent. The child's
// driver calls fail without touching a lock, as CUDA's do, but code that runs at its exit may still look at the device.
Device::Device() {
  const auto lock_all = [] {
    for (std::mutex* mutex : get().mutexes()) mutex->lock();
  };
  const auto unlock_all = [] {
    for (std::mutex* mutex : get().mutexes()) mutex->unlock();
  };
  const auto unlock_in_child = [] {
    for (std::mutex* mutex : get().mutexes()) mutex->unlock();
    if (get().is_initialized) get().is_forked_child = true;
  };
  pthread_atfork(lock_all, unlock_all, unlock_in_child);
}

bool Device::configure_from_environment(std::string& error) {
  if (is_configured_) return true;
  Config config;
  if (!read_environment(config, error)) return false;
  apply(config);
  return true;
}

void Device::apply(const Config& config) {
  if (memory == nullptr || memory->device_bytes() != config.memory_bytes || granularity != config.granularity_bytes) {
    auto new_memory = std::make_unique<PhysicalMemory>(config.memory_bytes);
    addresses = std::make_unique<AddressSpace>(*new_memory, config.granularity_bytes);
    memory = std::move(new_memory);
    granularity = config.granularity_bytes;
  }
  h2d.configure(config.h2d);
  d2h.configure(config.d2h);
  is_configured_ = true;
}

bool Device::initialize(std::string& error) {
  const std::lock_guard<std::mutex> lock(memory_mutex);
  if (is_initialized) return true;
  if (!configure_from_environment(error)) return false;
  if (!wrong_faults_.empty()) {
    error = wrong_faults_;
    has_read_faults_ = false;  // they may be right the next time
    return false;
  }
  is_initialized = true;
  return true;
}

void Device::read_faults() {
  const std::lock_guard<std::mutex> lock(memory_mutex);
  if (has_read_faults_) return;
  has_read_faults_ = true;
  wrong_faults_.clear();
  if (const char* rules = std::getenv("OOC_EMULATED_FAULTS")) faults.add(rules, wrong_faults_);
  const char* file = std::getenv("OOC_EMULATED_SITES");
  if (file != nullptr && *file != '\0') sites.watch(file);
}

bool Device::get_config(Config& config, std::string& error) {
  const std::lock_guard<std::mutex> lock(memory_mutex);
  if (!configure_from_environment(error)) return false;
  config = {memory->device_bytes(), granularity, h2d.config(), d2h.config()};
  return true;
}

bool Device::set_config(const Config& config, std::string& error) {
  if (!validate(config, error)) return false;
  const std::lock_guard<std::mutex> lock(memory_mutex);
  const bool is_in_use = memory != nullptr && (memory->used_bytes() + memory->host_bytes() > 0 || addresses->reservations() > 0);
  if (is_in_use && (memory->device_bytes() != config.memory_bytes || granularity != config.granularity_bytes)) {
    error = "memory_bytes and granularity_bytes cannot change while memory is created or addresses are reserved";
    return false;
  }
  apply(config);
  return true;
}

CUcontext primary_context() {
  static char token;
  return reinterpret_cast<CUcontext>(&token);
}

CUcontext& current_context() {
  thread_local CUcontext context = nullptr;
  return context;
}

std::string& last_error() {
  thread_local std::string error;
  return error;
}

CUresult enter_always(Call call, const void* return_address) noexcept {
  Device::get().sites.count(call, return_address);
  return Device::get().faults.check(call, return_address);
}

CUresult enter(Call call, Needs needs, const void* return_address) noexcept {
  Device& device = Device::get();
  if (device.is_forked_child) return CUDA_ERROR_NOT_INITIALIZED;
  device.calls[static_cast<size_t>(call)].fetch_add(1, std::memory_order_relaxed);
  if (call == Call::cuInit) device.read_faults();
  device.sites.count(call, return_address);
  if (needs != Needs::kNothing && !device.is_initialized) return CUDA_ERROR_NOT_INITIALIZED;
  if (needs != Needs::kNothing && Streams::in_host_function()) return CUDA_ERROR_NOT_PERMITTED;
  if (needs == Needs::kContext && (current_context() == nullptr || device.context_users == 0)) {
    return CUDA_ERROR_INVALID_CONTEXT;
  }
  return device.faults.check(call, return_address);
}

}  // namespace ooc::emulated
