#include "host_chunks.h"

#include <stdexcept>

namespace ooc {
namespace {

template <typename Body>
bool retried(const Driver& driver, Counted call, Body body) {
  constexpr int kRetries = 3;
  for (int attempt = 0; attempt < kRetries; ++attempt)
    if (driver.counted(call, body()) == CUDA_SUCCESS) return true;
  return false;
}

const std::string kNeededBy = "a function that fits no budget and cannot be cut";

}  // namespace

HostChunks::HostChunks(const Driver& driver, CUdevice device, uint64_t bytes, uint64_t chunk_bytes)
    : driver_(driver), bytes_(bytes / chunk_bytes * chunk_bytes), chunk_bytes_(chunk_bytes) {
  int supported = 0, node = 0;
  const CUdevice_attribute support = CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED;
  if (driver.cuDeviceGetAttribute(&supported, support, device) != CUDA_SUCCESS || supported == 0)
    throw std::runtime_error(kNeededBy + " needs a driver that makes physical host memory (cuMemCreate with "
                             "CU_MEM_LOCATION_TYPE_HOST_NUMA); this one does not");
  if (driver.cuDeviceGetAttribute(&node, CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID, device) != CUDA_SUCCESS || node < 0) node = 0;
  properties_.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties_.location = {CU_MEM_LOCATION_TYPE_HOST_NUMA, node};
  size_t granularity = 0;
  if (driver.cuMemGetAllocationGranularity(&granularity, &properties_, CU_MEM_ALLOC_GRANULARITY_MINIMUM) != CUDA_SUCCESS ||
      granularity == 0 || chunk_bytes % granularity != 0)
    throw std::runtime_error(kNeededBy + ": chunks of " + std::to_string(chunk_bytes) +
                             " bytes are no multiple of the " + std::to_string(granularity) +
                             " bytes of physical host memory: set OOC_CHUNK_SIZE");
  access_[0] = {{CU_MEM_LOCATION_TYPE_DEVICE, device}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  access_[1] = {properties_.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  CUdeviceptr address = 0;
  const CUresult result = driver.cuMemAddressReserve(&address, bytes_, chunk_bytes, 0, 0);
  if (result != CUDA_SUCCESS)
    throw std::runtime_error(kNeededBy + ": cuMemAddressReserve of " + std::to_string(bytes_) +
                             " bytes for host memory failed: " + describe(driver, result));
  base_ = reinterpret_cast<char*>(address);
  handles_.reserve(bytes_ / chunk_bytes_);
}

HostChunks::~HostChunks() {
  shrink(0);
  driver_.cuMemAddressFree(reinterpret_cast<CUdeviceptr>(base_), bytes_);
}

void HostChunks::shrink(size_t chunks) {
  while (handles_.size() > chunks) {
    retried(driver_, Counted::kMemUnmap, [&] { return driver_.cuMemUnmap(at(handles_.size() - 1), chunk_bytes_); });
    driver_.cuMemRelease(handles_.back());
    handles_.pop_back();
  }
}

bool HostChunks::extend(uint64_t bytes) {
  const size_t before = handles_.size();
  if (bytes > bytes_ - before * chunk_bytes_) return false;
  while (handles_.size() < before + bytes / chunk_bytes_) {
    CUmemGenericAllocationHandle handle = 0;
    const auto create = [&] { return driver_.cuMemCreate(&handle, chunk_bytes_, &properties_, 0); };
    if (!retried(driver_, Counted::kMemCreate, create)) break;
    const auto map = [&] { return driver_.cuMemMap(at(handles_.size()), chunk_bytes_, 0, handle, 0); };
    if (!retried(driver_, Counted::kMemMap, map)) {
      driver_.cuMemRelease(handle);
      break;
    }
    handles_.push_back(handle);
  }
  const bool complete = handles_.size() == before + bytes / chunk_bytes_;
  const auto set_access = [&] { return driver_.cuMemSetAccess(at(before), bytes, access_, 2); };
  if (complete && retried(driver_, Counted::kMemSetAccess, set_access)) return true;
  shrink(before);
  return false;
}

}  // namespace ooc
