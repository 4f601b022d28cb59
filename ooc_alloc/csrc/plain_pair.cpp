// ooc_malloc and ooc_free: the allocator for programs that announce no functions; see ooc_alloc.h.
//
// The core is read without a lock on the way of every call. Who sets or destroys it while another thread allocates
// breaks the rule that every destructor has.
#include <dlfcn.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <stdexcept>
#include <string>

#include "last_error.h"
#include "ooc_alloc.h"
#include "quantities.h"

namespace ooc {

namespace {

constexpr const char* kCudaDriver = "libcuda.so.1";
constexpr uint64_t kSmallAlignment = 512;  // what cudaMalloc's users rely on

std::atomic<ooc_core*> current{nullptr};

enum class Complaint { kBadArgument, kBadSetup, kOutOfMemory, kCount };

// The caller gets a null pointer, which some turn into a tensor without memory: the user should read why.
void* complain(Complaint kind, const std::string& message) {
  static std::atomic<bool> said[static_cast<size_t>(Complaint::kCount)];
  set_last_error(message, kind == Complaint::kOutOfMemory ? last_error_status() : OOC_INVALID);
  if (!said[static_cast<size_t>(kind)].exchange(true))
    std::fprintf(stderr, "ooc_malloc: %s (said once; ooc_last_error() has the latest)\n", message.c_str());
  return nullptr;
}

// A variable's value without the spaces around it; empty if it is not set.
std::string setting(const char* name) {
  const char* text = std::getenv(name);
  return std::string(trim(text != nullptr ? text : ""));
}

[[noreturn]] void refuse(const char* name, const std::string& text, const char* forms) {
  throw std::runtime_error(std::string(name) + "='" + text + "' is not valid: use for example " + forms);
}

uint64_t bytes_of(const char* name, uint64_t otherwise) {
  const std::string text = setting(name);
  uint64_t bytes = otherwise;
  if (!text.empty() && !parse_bytes(text, bytes)) refuse(name, text, "8GiB, 512MB, 1.5G or 65536");
  return bytes;
}

// The emulated driver is installed beside this library.
std::string emulated_driver() {
  Dl_info here{};
  if (dladdr(reinterpret_cast<void*>(&ooc_malloc), &here) == 0 || here.dli_fname == nullptr)
    throw std::runtime_error("the folder of libooc_alloc.so cannot be found, so neither can the emulated driver");
  const std::string file = here.dli_fname;
  const size_t slash = file.rfind('/');
  return (slash == std::string::npos ? "." : file.substr(0, slash)) + "/libooc_emulated_cuda.so";
}

bool wants_emulated() {
  const std::string text = setting("OOC_ALLOC");
  const std::string mode = lower(text);
  if (mode == "emulated") return true;
  for (const char* cuda : {"", "1", "auto", "on", "yes", "true", "cuda"})
    if (mode == cuda) return false;
  if (mode == "0" || mode == "off" || mode == "no" || mode == "false")
    throw std::runtime_error("OOC_ALLOC=" + text + " turns the allocator off, and the program allocates from it: unset "
                             "OOC_ALLOC, or do not install ooc_malloc");
  refuse("OOC_ALLOC", text, "cuda or emulated");
}

ooc_core* make_from_environment(int device) {
  const bool emulated = wants_emulated();
  const std::string driver = emulated ? emulated_driver() : kCudaDriver;
  ooc_config config{};
  config.struct_bytes = sizeof config;
  config.device_ordinal = device;
  config.driver_library = driver.c_str();
  config.chunk_bytes = bytes_of("OOC_CHUNK_SIZE", uint64_t{2} << 20);
  config.small_limit_bytes = bytes_of("OOC_SMALL_LIMIT", uint64_t{1} << 20);
  config.small_alignment = kSmallAlignment;
  config.asynchronous = emulated ? 0 : 1;  // its kernels run on the host
  config.run_daemon = 0;                   // nothing of the pair's ever moves
  const std::string budget = setting("OOC_BUDGET");
  if (!budget.empty()) {
    uint64_t total = 0, free = 0;
    if (ooc_device_memory(driver.c_str(), device, &total, &free) != OOC_OK) throw std::runtime_error(ooc_last_error());
    if (!parse_amount(budget, total, config.budget_bytes)) refuse("OOC_BUDGET", budget, "8GiB, 512MB, 65536 or 60%");
  }
  ooc_core* core = ooc_core_create(&config);
  if (core == nullptr) throw std::runtime_error(ooc_last_error());
  return core;
}

// Returns null if the core cannot be made, and says so. A set-up that failed is tried again with the next allocation,
// as it costs little.
ooc_core* core_for(int device) {
  ooc_core* core = current.load(std::memory_order_acquire);
  if (core != nullptr) return core;
  static auto* mutex = new std::mutex;  // threads may allocate after static objects are gone
  const std::lock_guard<std::mutex> lock(*mutex);
  core = current.load(std::memory_order_acquire);
  if (core != nullptr) return core;
  try {
    core = make_from_environment(device);
  } catch (const std::exception& error) {
    complain(Complaint::kBadSetup, error.what());
    return nullptr;
  }
  current.store(core, std::memory_order_release);
  return core;
}

}  // namespace

void plain_pair_forgets(const ooc_core* core) {
  ooc_core* expected = const_cast<ooc_core*>(core);
  current.compare_exchange_strong(expected, nullptr);
}

}  // namespace ooc

void* ooc_malloc(ssize_t bytes, int device, void* stream) {
  using namespace ooc;
  if (bytes == 0) return nullptr;
  if (bytes < 0 || device < 0)
    return complain(Complaint::kBadArgument,
                    std::to_string(bytes) + " bytes of device " + std::to_string(device) + " were asked for");
  ooc_core* core = core_for(device);
  if (core == nullptr) return nullptr;
  if (ooc_core_device_ordinal(core) != device)
    return complain(Complaint::kBadArgument,
                    "memory of device " + std::to_string(device) + " was asked for, and the allocator manages device " +
                        std::to_string(ooc_core_device_ordinal(core)) + ": one process manages one device");
  void* address = ooc_core_malloc_pinned(core, static_cast<uint64_t>(bytes), stream, OOC_READ | OOC_WRITE, nullptr);
  if (address == nullptr) complain(Complaint::kOutOfMemory, ooc_last_error());
  return address;
}

void ooc_free(void* address, ssize_t, int, void* stream) {
  ooc_core* core = ooc::current.load(std::memory_order_acquire);
  if (address != nullptr && core != nullptr) ooc_core_free_on(core, address, stream);
}

void ooc_set_default_core(ooc_core* core) { ooc::current.store(core, std::memory_order_release); }
