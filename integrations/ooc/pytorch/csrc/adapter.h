// What the parts of the adapter share.
#pragma once

#include <c10/core/DispatchKeySet.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <string>

#include "ooc_alloc.h"

namespace ooc_torch __attribute__((visibility("hidden"))) {

#ifdef OOC_WITH_CUDA
constexpr bool kWithCuda = true;  // the installed PyTorch is one for CUDA; its CPU tensors can be managed too
#else
constexpr bool kWithCuda = false;
#endif

constexpr auto kKey = c10::DispatchKey::Fake;
inline const c10::DispatchKeySet kBelow(c10::DispatchKeySet::FULL_AFTER, kKey);

inline ooc_core* core = nullptr;  // set once; stays valid for the life of the process
inline int cuda_device = -1;      // the CUDA device whose memory is managed; -1: the memory of CPU tensors is
inline uint64_t slice_bytes = uint64_t{64} << 20, small_bytes = 0, chunk_bytes = 0;
inline uintptr_t range_base = 0, range_bytes = 0, slab_base = 0;

inline bool owned(const void* address) { return reinterpret_cast<uintptr_t>(address) - range_base < range_bytes; }
// Whether an address that is ours lies in a slab. What lies there never leaves the device.
inline bool in_slab(const void* address) { return reinterpret_cast<uintptr_t>(address) >= slab_base; }
inline bool on_cuda() { return kWithCuda && cuda_device >= 0; }

// Throws the core's last error in this thread, as PyTorch's own exception for it.
[[noreturn]] inline void raise(int status) {
  const std::string message = ooc_last_error();
  TORCH_CHECK_WITH(OutOfMemoryError, status != OOC_OUT_OF_MEMORY, message);
  TORCH_CHECK(false, message);
}

}  // namespace ooc_torch
