// Pinned host memory: what was allocated by cuMemHostAlloc, and what was registered by cuMemHostRegister.
//
// Nothing is locked into memory. The ranges are kept to find what a real driver would refuse.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <iterator>
#include <map>
#include <mutex>

#include "cuda_abi.h"

namespace ooc::emulated {

class HostMemory {
 public:
  CUresult allocate(uint64_t bytes, void*& pointer) {
    if (bytes == 0) return CUDA_ERROR_INVALID_VALUE;
    void* mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    const std::lock_guard<std::mutex> lock(mutex);
    ranges_[reinterpret_cast<uint64_t>(mapped)] = {bytes, true};
    pointer = mapped;
    return CUDA_SUCCESS;
  }
  CUresult free(void* pointer) {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = ranges_.find(reinterpret_cast<uint64_t>(pointer));
    if (found == ranges_.end() || !found->second.is_allocated) return CUDA_ERROR_INVALID_VALUE;
    munmap(pointer, found->second.bytes);
    ranges_.erase(found);
    return CUDA_SUCCESS;
  }
  // Mapped memory, overlapping no other range.
  CUresult register_range(void* pointer, uint64_t bytes) {
    const uint64_t address = reinterpret_cast<uint64_t>(pointer);
    if (address == 0 || bytes == 0 || address + bytes < address || !is_mapped(address, bytes)) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    const std::lock_guard<std::mutex> lock(mutex);
    const auto next = ranges_.lower_bound(address);
    if (next != ranges_.end() && next->first < address + bytes) return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    if (next != ranges_.begin()) {
      const auto previous = std::prev(next);
      if (previous->first + previous->second.bytes > address) return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    }
    ranges_[address] = {bytes, false};
    return CUDA_SUCCESS;
  }
  CUresult unregister(void* pointer) {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = ranges_.find(reinterpret_cast<uint64_t>(pointer));
    if (found == ranges_.end() || found->second.is_allocated) return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
    ranges_.erase(found);
    return CUDA_SUCCESS;
  }

  // Whether every byte is pinned.
  bool is_pinned(const void* pointer, uint64_t bytes) {
    uint64_t address = reinterpret_cast<uint64_t>(pointer);
    const uint64_t end = address + bytes;
    const std::lock_guard<std::mutex> lock(mutex);
    auto range = ranges_.upper_bound(address);
    if (range == ranges_.begin()) return false;
    for (--range; range != ranges_.end() && range->first <= address; ++range) {
      address = range->first + range->second.bytes;
      if (address >= end) return true;
    }
    return false;
  }

  std::mutex mutex;  // public for the fork handlers; guards everything below

 private:
  struct Range {
    uint64_t bytes;
    bool is_allocated;  // by cuMemHostAlloc; else registered
  };
  // msync with MS_ASYNC does nothing, but fails for a range that is not mapped as a whole.
  static bool is_mapped(uint64_t address, uint64_t bytes) {
    const uint64_t page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
    const uint64_t start = address / page * page;
    return msync(reinterpret_cast<void*>(start), address + bytes - start, MS_ASYNC) == 0;
  }

  std::map<uint64_t, Range> ranges_;  // by address
};

}  // namespace ooc::emulated
