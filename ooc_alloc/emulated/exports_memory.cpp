// The driver's virtual memory management.
#include "exports.h"

namespace ooc {
namespace {

bool is_this_device(const CUmemLocation& location) {
  return location.type == CU_MEM_LOCATION_TYPE_DEVICE && location.id == 0;
}

bool is_known(CUmemAccess_flags access) {
  return access == CU_MEM_ACCESS_FLAGS_PROT_NONE || access == CU_MEM_ACCESS_FLAGS_PROT_READ ||
         access == CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
}

CUresult check(const CUmemAllocationProp* prop) {
  if (prop == nullptr || prop->type != CU_MEM_ALLOCATION_TYPE_PINNED) return CUDA_ERROR_INVALID_VALUE;
  const CUmemLocationType type = prop->location.type;
  if (type != CU_MEM_LOCATION_TYPE_DEVICE && type != CU_MEM_LOCATION_TYPE_HOST_NUMA) return CUDA_ERROR_INVALID_VALUE;
  if (prop->location.id != 0) return CUDA_ERROR_INVALID_DEVICE;
  return prop->requestedHandleTypes == CU_MEM_HANDLE_TYPE_NONE ? CUDA_SUCCESS : CUDA_ERROR_NOT_SUPPORTED;
}

}  // namespace

extern "C" {

CUresult cuMemGetInfo_v2(size_t* free_bytes, size_t* total_bytes) {
  return perform(Call::cuMemGetInfo, [=](Device& device) {
    if (free_bytes == nullptr || total_bytes == nullptr) return CUDA_ERROR_INVALID_VALUE;
    const Guard lock(device.memory_mutex);
    *total_bytes = device.memory->device_bytes();
    *free_bytes = *total_bytes - device.memory->used_bytes();
    return CUDA_SUCCESS;
  });
}

CUresult cuMemGetAllocationGranularity(size_t* granularity, const CUmemAllocationProp* prop,
                                       CUmemAllocationGranularity_flags option) {
  return perform(Call::cuMemGetAllocationGranularity, Needs::kDevice, [=](Device& device) {
    const bool is_known = option == CU_MEM_ALLOC_GRANULARITY_MINIMUM || option == CU_MEM_ALLOC_GRANULARITY_RECOMMENDED;
    if (granularity == nullptr || !is_known) return CUDA_ERROR_INVALID_VALUE;
    const CUresult refusal = check(prop);
    if (refusal != CUDA_SUCCESS) return refusal;
    const Guard lock(device.memory_mutex);
    *granularity = device.granularity;
    return CUDA_SUCCESS;
  });
}

CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t size, const CUmemAllocationProp* prop,
                     unsigned long long flags) {
  return perform(Call::cuMemCreate, Needs::kDevice, [=](Device& device) {
    if (handle == nullptr || flags != 0) return CUDA_ERROR_INVALID_VALUE;
    const CUresult refusal = check(prop);
    if (refusal != CUDA_SUCCESS) return refusal;
    std::unique_lock<std::mutex> lock(device.memory_mutex);
    if (size == 0 || size % device.granularity != 0) return CUDA_ERROR_INVALID_VALUE;
    Faults::covers(1, size);
    uint64_t offset = 0;
    const bool on_host = prop->location.type == CU_MEM_LOCATION_TYPE_HOST_NUMA;
    if (!device.memory->take(size, on_host, offset)) return CUDA_ERROR_OUT_OF_MEMORY;
    lock.unlock();  // others need not wait for the pages; the bytes taken keep set_config from replacing it
    const bool is_filled = device.memory->fill(offset, size);
    lock.lock();
    if (!is_filled) {
      device.memory->give_back(offset, size);
      return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *handle = device.memory->publish(offset, size);
    return CUDA_SUCCESS;
  });
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  return perform(Call::cuMemRelease, Needs::kDevice, [=](Device& device) {
    const Guard lock(device.memory_mutex);
    const int64_t slot = device.memory->find(handle);
    if (slot < 0) return CUDA_ERROR_INVALID_VALUE;
    Faults::covers(1, device.memory->allocation(static_cast<uint32_t>(slot)).bytes);
    device.memory->release(static_cast<uint32_t>(slot));
    return CUDA_SUCCESS;
  });
}

CUresult cuMemAddressReserve(CUdeviceptr* address, size_t size, size_t alignment, CUdeviceptr hint,
                             unsigned long long flags) {
  return perform(Call::cuMemAddressReserve, Needs::kDevice, [=](Device& device) {
    if (address == nullptr || flags != 0) return CUDA_ERROR_INVALID_VALUE;
    const Guard lock(device.memory_mutex);
    uint64_t reserved = 0;
    const CUresult result = device.addresses->reserve(size, alignment, hint, reserved);
    if (result == CUDA_SUCCESS) *address = reserved;
    return result;
  });
}

CUresult cuMemAddressFree(CUdeviceptr address, size_t size) {
  return perform(Call::cuMemAddressFree, Needs::kDevice, [=](Device& device) {
    const Guard lock(device.memory_mutex);
    return device.addresses->free(address, size);
  });
}

CUresult cuMemMap(CUdeviceptr address, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long flags) {
  return perform(Call::cuMemMap, Needs::kDevice, [=](Device& device) {
    if (offset != 0 || flags != 0) return CUDA_ERROR_INVALID_VALUE;
    const Guard lock(device.memory_mutex);
    const int64_t slot = device.memory->find(handle);
    if (slot < 0) return CUDA_ERROR_INVALID_VALUE;
    Faults::covers(1, size);
    return device.addresses->map(address, size, static_cast<uint32_t>(slot));
  });
}

CUresult cuMemUnmap(CUdeviceptr address, size_t size) {
  return perform(Call::cuMemUnmap, Needs::kDevice, [=](Device& device) {
    const Guard lock(device.memory_mutex);
    Faults::covers(device.addresses->mappings_in(address, size), size);
    return device.addresses->unmap(address, size);
  });
}

CUresult cuMemSetAccess(CUdeviceptr address, size_t size, const CUmemAccessDesc* desc, size_t count) {
  return perform(Call::cuMemSetAccess, Needs::kDevice, [=](Device& device) {
    // There may be one descriptor for the device and one for the host; only memory on the host can be made accessible to
    // the host. Here the host sees what the device sees, so the device's flags count if both are given.
    if (desc == nullptr || count < 1 || count > 2) return CUDA_ERROR_INVALID_VALUE;
    const CUmemAccessDesc* for_device = nullptr;
    const CUmemAccessDesc* for_host = nullptr;
    for (size_t i = 0; i < count; ++i) {
      const bool is_host = desc[i].location.type == CU_MEM_LOCATION_TYPE_HOST_NUMA;
      const CUmemAccessDesc*& place = is_host ? for_host : for_device;
      if (place != nullptr || !is_known(desc[i].flags)) return CUDA_ERROR_INVALID_VALUE;
      if (!is_host && !is_this_device(desc[i].location)) return CUDA_ERROR_INVALID_VALUE;
      place = &desc[i];
    }
    const Guard lock(device.memory_mutex);
    if (for_host != nullptr && !device.addresses->is_all_on_host(address, size)) return CUDA_ERROR_INVALID_VALUE;
    Faults::covers(device.addresses->mappings_in(address, size), size);
    return device.addresses->set_access(address, size, (for_device != nullptr ? for_device : for_host)->flags);
  });
}

CUresult cuMemGetAccess(unsigned long long* flags, const CUmemLocation* location, CUdeviceptr address) {
  return perform(Call::cuMemGetAccess, Needs::kDevice, [=](Device& device) {
    if (flags == nullptr || location == nullptr || !is_this_device(*location)) return CUDA_ERROR_INVALID_VALUE;
    const Guard lock(device.memory_mutex);
    const int access = device.addresses->access(address, 1);
    if (access < 0) return CUDA_ERROR_INVALID_VALUE;
    *flags = static_cast<unsigned long long>(access);
    return CUDA_SUCCESS;
  });
}

}  // extern "C"
}  // namespace ooc
