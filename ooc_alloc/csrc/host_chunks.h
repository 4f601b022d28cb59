// Host memory made of physical chunks of the driver's, one after another in a range of addresses that the host and the
// device can use. A chunk of it can be mapped at a second address (docs/decisions/0004-host-backed-memory.md).
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "driver.h"

namespace ooc {

// The node of the host's memory that is nearest to the device; -1 where the driver knows of none.
inline int host_node(const Driver& driver, CUdevice device) {
  int node = -1;
  return driver.cuDeviceGetAttribute(&node, CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID, device) == CUDA_SUCCESS ? node : -1;
}

class HostChunks {
 public:
  // Throws std::runtime_error if the driver cannot do that, or has no addresses.
  HostChunks(const Driver& driver, CUdevice device, uint64_t bytes, uint64_t chunk_bytes)
      : driver_(driver), bytes_(bytes / chunk_bytes * chunk_bytes), chunk_bytes_(chunk_bytes) {
    const std::string needed_by = "a function that fits no budget and cannot be cut";
    int supported = 0;
    const CUdevice_attribute support = CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED;
    if (driver.cuDeviceGetAttribute(&supported, support, device) != CUDA_SUCCESS || supported == 0)
      throw std::runtime_error(needed_by + " needs a driver that makes physical host memory (cuMemCreate with "
                               "CU_MEM_LOCATION_TYPE_HOST_NUMA); this one does not");
    properties_ = memory_at({CU_MEM_LOCATION_TYPE_HOST_NUMA, std::max(0, host_node(driver, device))});
    size_t granularity = 0;
    if (driver.cuMemGetAllocationGranularity(&granularity, &properties_, CU_MEM_ALLOC_GRANULARITY_MINIMUM) !=
            CUDA_SUCCESS ||
        granularity == 0 || chunk_bytes % granularity != 0)
      throw std::runtime_error(needed_by + ": chunks of " + std::to_string(chunk_bytes) +
                               " bytes are no multiple of the " + std::to_string(granularity) +
                               " bytes of physical host memory: set OOC_CHUNK_SIZE");
    access_[0] = {{CU_MEM_LOCATION_TYPE_DEVICE, device}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    access_[1] = {properties_.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CUdeviceptr address = 0;
    const CUresult result = driver.cuMemAddressReserve(&address, bytes_, chunk_bytes, 0, 0);
    if (result != CUDA_SUCCESS)
      throw std::runtime_error(needed_by + ": cuMemAddressReserve of " + std::to_string(bytes_) +
                               " bytes for host memory failed: " + describe(driver, result));
    base_ = reinterpret_cast<char*>(address);
    handles_.reserve(bytes_ / chunk_bytes_);
  }
  ~HostChunks() {
    shrink(0);
    driver_.cuMemAddressFree(reinterpret_cast<CUdeviceptr>(base_), bytes_);
  }
  HostChunks(const HostChunks&) = delete;
  HostChunks& operator=(const HostChunks&) = delete;

  char* base() const { return base_; }
  uint64_t chunk_bytes() const { return chunk_bytes_; }
  // Backs the next bytes (whole chunks) of the range. Returns false if there is no memory; then nothing has changed.
  bool extend(uint64_t bytes) {
    const size_t before = handles_.size();
    if (bytes > bytes_ - before * chunk_bytes_) return false;
    while (handles_.size() < before + bytes / chunk_bytes_) {
      CUmemGenericAllocationHandle handle = 0;
      const auto create = [&] { return driver_.cuMemCreate(&handle, chunk_bytes_, &properties_, 0); };
      if (driver_.retried(Counted::kMemCreate, create) != CUDA_SUCCESS) break;
      const auto map = [&] { return driver_.cuMemMap(at(handles_.size()), chunk_bytes_, 0, handle, 0); };
      if (driver_.retried(Counted::kMemMap, map) != CUDA_SUCCESS) {
        driver_.cuMemRelease(handle);
        break;
      }
      handles_.push_back(handle);
    }
    const bool complete = handles_.size() == before + bytes / chunk_bytes_;
    const auto set_access = [&] { return driver_.cuMemSetAccess(at(before), bytes, access_, 2); };
    if (complete && driver_.retried(Counted::kMemSetAccess, set_access) == CUDA_SUCCESS) return true;
    shrink(before);
    return false;
  }
  // Of the chunk at an address that is backed.
  CUmemGenericAllocationHandle handle(const char* address) const {
    return handles_[static_cast<uint64_t>(address - base_) / chunk_bytes_];
  }

 private:
  void shrink(size_t chunks) {
    while (handles_.size() > chunks) {
      driver_.retried(Counted::kMemUnmap, [&] { return driver_.cuMemUnmap(at(handles_.size() - 1), chunk_bytes_); });
      driver_.cuMemRelease(handles_.back());
      handles_.pop_back();
    }
  }
  CUdeviceptr at(size_t chunk) const { return reinterpret_cast<CUdeviceptr>(base_) + chunk * chunk_bytes_; }

  const Driver& driver_;
  uint64_t bytes_, chunk_bytes_;
  char* base_ = nullptr;
  CUmemAllocationProp properties_{};
  CUmemAccessDesc access_[2]{};  // the device and the host
  std::vector<CUmemGenericAllocationHandle> handles_;
};

}  // namespace ooc
