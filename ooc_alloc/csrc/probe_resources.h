// What the probe measures with: an opened driver, a range of chunks, a buffer on the host. Each undoes what it did.
#pragma once

#include <sys/mman.h>

#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "driver.h"
#include "probe.h"

namespace ooc::probing {

class ProbeFailure : public std::runtime_error {
 public:
  ProbeFailure(int code, const std::string& text) : std::runtime_error(text), status(code) {}
  int status;
};

}  // namespace ooc::probing

struct ooc_probe {
  std::unique_ptr<ooc::Driver> driver;
  ooc::CUdevice device = 0;
  ooc::CUcontext context = nullptr;
  ooc::CUstream out = nullptr, in = nullptr;
  ooc::CUmemAllocationProp properties{};
  ooc::CUmemAccessDesc access{};
  size_t granularity = 0;

  ~ooc_probe() {
    if (out != nullptr) driver->cuStreamDestroy(out);
    if (in != nullptr) driver->cuStreamDestroy(in);
    if (context != nullptr) driver->cuDevicePrimaryCtxRelease(device);
  }

  void check(ooc::CUresult result, const char* call) const {
    if (result == ooc::CUDA_SUCCESS) return;
    const int status = result == ooc::CUDA_ERROR_OUT_OF_MEMORY ? OOC_OUT_OF_MEMORY : OOC_DRIVER_FAILURE;
    throw ooc::probing::ProbeFailure(status, std::string(call) + " failed: " + ooc::describe(*driver, result));
  }

  void open(const char* library, int ordinal) {
    std::string error;
    driver = ooc::load_driver(library, error);
    if (driver == nullptr) throw ooc::probing::ProbeFailure(OOC_INVALID, error);
    check(driver->cuInit(0), "cuInit");
    check(driver->cuDeviceGet(&device, ordinal), "cuDeviceGet");
    check(driver->cuDevicePrimaryCtxRetain(&context, device), "cuDevicePrimaryCtxRetain");
    check(driver->cuCtxSetCurrent(context), "cuCtxSetCurrent");
    properties.type = ooc::CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location = {ooc::CU_MEM_LOCATION_TYPE_DEVICE, device};
    access = {properties.location, ooc::CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    check(driver->cuMemGetAllocationGranularity(&granularity, &properties, ooc::CU_MEM_ALLOC_GRANULARITY_MINIMUM),
          "cuMemGetAllocationGranularity");
    check(driver->cuStreamCreate(&out, ooc::CU_STREAM_NON_BLOCKING), "cuStreamCreate");
    check(driver->cuStreamCreate(&in, ooc::CU_STREAM_NON_BLOCKING), "cuStreamCreate");
  }
};

namespace ooc::probing {

// A reserved range and its chunks. Every step is a method, so that it can be timed; the destructor undoes it.
class Range {
 public:
  Range(const ooc_probe& probe, uint64_t chunk_bytes, uint32_t chunks)
      : probe_(probe), driver_(*probe.driver), chunk_(chunk_bytes), count_(chunks) {
    probe.check(driver_.cuMemAddressReserve(&base_, bytes(), 0, 0, 0), "cuMemAddressReserve");
  }
  ~Range() {
    if (mapped_ > 0) driver_.cuMemUnmap(base_, mapped_ * chunk_);
    for (const auto handle : handles_) driver_.cuMemRelease(handle);
    driver_.cuMemAddressFree(base_, bytes());
  }
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;

  CUdeviceptr base() const { return base_; }
  uint64_t bytes() const { return chunk_ * count_; }

  void create() {
    while (handles_.size() < count_) {
      CUmemGenericAllocationHandle handle = 0;
      probe_.check(driver_.cuMemCreate(&handle, chunk_, &probe_.properties, 0), "cuMemCreate");
      handles_.push_back(handle);
    }
  }
  void map() {
    for (; mapped_ < count_; ++mapped_)
      probe_.check(driver_.cuMemMap(base_ + mapped_ * chunk_, chunk_, 0, handles_[mapped_], 0), "cuMemMap");
  }
  void set_access() { probe_.check(driver_.cuMemSetAccess(base_, bytes(), &probe_.access, 1), "cuMemSetAccess"); }
  void unmap() {
    probe_.check(driver_.cuMemUnmap(base_, bytes()), "cuMemUnmap");
    mapped_ = 0;
  }
  void release() {
    while (!handles_.empty()) {
      const auto handle = handles_.back();
      handles_.pop_back();
      probe_.check(driver_.cuMemRelease(handle), "cuMemRelease");
    }
  }

 private:
  const ooc_probe& probe_;
  const Driver& driver_;
  const uint64_t chunk_;
  const uint32_t count_;
  CUdeviceptr base_ = 0;
  uint32_t mapped_ = 0;
  std::vector<CUmemGenericAllocationHandle> handles_;
};

// Page-aligned host memory that has been touched; pinned if asked for.
class HostBuffer {
 public:
  HostBuffer(const ooc_probe& probe, uint64_t bytes, bool pinned) : probe_(probe), bytes_(bytes) {
    address_ = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (address_ == MAP_FAILED)
      throw ProbeFailure(OOC_OUT_OF_MEMORY, "no host memory for " + std::to_string(bytes) + " bytes");
    std::memset(address_, 1, bytes);
    try {
      if (pinned) pin();
    } catch (...) {
      munmap(address_, bytes_);
      throw;
    }
  }
  ~HostBuffer() {
    if (pinned_) probe_.driver->cuMemHostUnregister(address_);
    munmap(address_, bytes_);
  }
  HostBuffer(const HostBuffer&) = delete;
  HostBuffer& operator=(const HostBuffer&) = delete;

  void* address() const { return address_; }
  void pin() {
    probe_.check(probe_.driver->cuMemHostRegister(address_, bytes_, kMemHostRegisterPortable), "cuMemHostRegister");
    pinned_ = true;
  }
  void unpin() {
    probe_.check(probe_.driver->cuMemHostUnregister(address_), "cuMemHostUnregister");
    pinned_ = false;
  }

 private:
  const ooc_probe& probe_;
  const uint64_t bytes_;
  void* address_ = nullptr;
  bool pinned_ = false;
};

}  // namespace ooc::probing
