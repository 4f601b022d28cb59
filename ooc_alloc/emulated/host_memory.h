// Pinned host memory: what was allocated by cuMemHostAlloc, and what was registered by cuMemHostRegister.
//
// Nothing is locked into memory. The ranges are kept to find what a real driver would refuse.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>

#include "cuda_abi.h"

namespace ooc::emulated {

class HostMemory {
 public:
  CUresult allocate(uint64_t bytes, void*& pointer);
  CUresult free(void* pointer);
  CUresult register_range(void* pointer, uint64_t bytes);  // of mapped memory, overlapping no other range
  CUresult unregister(void* pointer);

  std::mutex mutex;  // public for the fork handlers; guards everything below

 private:
  struct Range {
    uint64_t bytes;
    bool is_allocated;  // by cuMemHostAlloc; else registered
  };
  std::map<uint64_t, Range> ranges_;  // by address
};

}  // namespace ooc::emulated
