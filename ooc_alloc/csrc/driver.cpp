#include "driver.h"

#include <dlfcn.h>

#include <iterator>

namespace ooc {
namespace {

constexpr bool kRequired = true;
constexpr bool kOptional = false;

// The linker's message names the file and the cause ("cannot open shared object file: No such file or directory").
std::string linker_error() {
  const char* message = dlerror();
  return message != nullptr ? message : "unknown error of the dynamic linker";
}

}  // namespace

std::unique_ptr<Driver> load_driver(const char* library, std::string& error) {
  error.clear();
  if (library == nullptr || *library == '\0') {
    error = "no driver library was named";
    return nullptr;
  }
  void* handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    error = "cannot load the driver: " + linker_error();
    return nullptr;
  }
  auto driver = std::make_unique<Driver>();
  driver->library = library;
  driver->handle = handle;

  std::string missing;
  const auto resolve = [&](const char* symbol, bool required) {
    void* address = dlsym(handle, symbol);
    if (address == nullptr && required) missing += (missing.empty() ? "" : ", ") + std::string(symbol);
    return address;
  };
#define OOC_DRIVER_RESOLVE(need, member, symbol, parameters) \
  driver->member = reinterpret_cast<decltype(driver->member)>(resolve(#symbol, need));
  OOC_DRIVER_CALLS(OOC_DRIVER_RESOLVE)
#undef OOC_DRIVER_RESOLVE

  if (!missing.empty()) {
    error = std::string("the driver ") + library + " lacks " + missing + ": it is too old, or not a CUDA driver";
    dlclose(handle);
    return nullptr;
  }
  return driver;
}

void Driver::note_failure(Counted call, CUresult result) const {
  ++failures_[static_cast<size_t>(call)];
  if (call != Counted::kHostRegister)
    last_refusal_ = static_cast<uint64_t>(call) << 32 | static_cast<uint32_t>(result);
}

std::string Driver::last_refusal() const {
  static constexpr const char* kNames[] = {
      "cuMemCreate",        "cuMemMap",          "cuMemSetAccess", "cuMemUnmap",    "cuMemcpyDtoHAsync",  "cuMemcpyHtoDAsync",
      "cuMemHostRegister",  "cuEventCreate",     "cuEventRecord",  "the wait for an event", "the wait for a stream",
      "cuStreamWaitEvent"};
  static_assert(std::size(kNames) == static_cast<size_t>(Counted::kCount));
  const uint64_t last = last_refusal_;
  return std::string(kNames[last >> 32]) + ", with " + describe(*this, static_cast<CUresult>(last & 0xffffffff));
}

std::string describe(const Driver& driver, CUresult result) {
  const char* name = nullptr;
  const char* text = nullptr;
  if (driver.cuGetErrorName(result, &name) != CUDA_SUCCESS || name == nullptr) {
    return "CUDA error " + std::to_string(static_cast<int>(result));
  }
  std::string description = std::string(name) + " (" + std::to_string(static_cast<int>(result)) + ")";
  if (driver.cuGetErrorString(result, &text) == CUDA_SUCCESS && text != nullptr) description += std::string(": ") + text;
  return description;
}

}  // namespace ooc
