// Functions on CUDA streams: what the allocator and the operators tell each other.
#pragma once

#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAStream.h>

#include <optional>

#include "cuda_route.h"

namespace ooc_torch __attribute__((visibility("hidden"))) {

// While one exists, no capture that is under way takes what this thread does for unsafe.
class RelaxedCapture {
 public:
  explicit RelaxedCapture(bool any_capture) {
    if (any_capture) guard_.emplace(cudaStreamCaptureModeRelaxed);
  }

 private:
  std::optional<c10::cuda::CUDAStreamCaptureModeGuard> guard_;
};

// The allocator calls these when this thread has allocated, or freed, memory that can be swapped.
void function_allocated(void* block);
void function_freed(void* block);

bool any_capture();  // into a pool of PyTorch's; cuda_allocator.cpp
bool captured(cudaStream_t stream);
// Whether the stream is the program's own, which it may destroy: the id of one of PyTorch's is no handle.
inline bool is_external(c10::cuda::CUDAStream stream) {
  return stream.stream() != nullptr && stream.id() == reinterpret_cast<c10::StreamId>(stream.stream());
}

inline bool in_forked_child = false;  // after CUDA was initialised
void refuse_forked_child();           // throws there, before a call of the runtime fails and says less

}  // namespace ooc_torch
