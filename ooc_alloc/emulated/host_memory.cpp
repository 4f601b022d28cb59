#include "host_memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <iterator>

namespace ooc::emulated {
namespace {

// msync with MS_ASYNC does nothing, but fails for a range that is not mapped as a whole.
bool is_mapped(uint64_t address, uint64_t bytes) {
  const uint64_t page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  const uint64_t start = address / page * page;
  return msync(reinterpret_cast<void*>(start), address + bytes - start, MS_ASYNC) == 0;
}

}  // namespace

CUresult HostMemory::allocate(uint64_t bytes, void*& pointer) {
  if (bytes == 0) return CUDA_ERROR_INVALID_VALUE;
  void* mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  const std::lock_guard<std::mutex> lock(mutex);
  ranges_[reinterpret_cast<uint64_t>(mapped)] = {bytes, true};
  pointer = mapped;
  return CUDA_SUCCESS;
}

CUresult HostMemory::free(void* pointer) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = ranges_.find(reinterpret_cast<uint64_t>(pointer));
  if (found == ranges_.end() || !found->second.is_allocated) return CUDA_ERROR_INVALID_VALUE;
  munmap(pointer, found->second.bytes);
  ranges_.erase(found);
  return CUDA_SUCCESS;
}

CUresult HostMemory::register_range(void* pointer, uint64_t bytes) {
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

CUresult HostMemory::unregister(void* pointer) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = ranges_.find(reinterpret_cast<uint64_t>(pointer));
  if (found == ranges_.end() || found->second.is_allocated) return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
  ranges_.erase(found);
  return CUDA_SUCCESS;
}

}  // namespace ooc::emulated
