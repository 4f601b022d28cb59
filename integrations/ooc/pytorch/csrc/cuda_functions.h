// Functions on CUDA streams: what the allocator and the operators tell each other.
#pragma once

#include <c10/cuda/CUDAGraphsC10Utils.h>

#include "cuda_route.h"

namespace ooc_torch __attribute__((visibility("hidden"))) {

// While one exists, what the thread does is not taken for unsafe by a capture elsewhere, or on its own stream.
class RelaxedCapture {
 public:
  RelaxedCapture() : guard_(cudaStreamCaptureModeRelaxed) {}

 private:
  c10::cuda::CUDAStreamCaptureModeGuard guard_;
};

// Memory that can be swapped was allocated, or freed, in this thread.
void function_allocated(void* block);
void function_freed(void* block);

bool any_capture();  // cuda_allocator.cpp
bool captured(cudaStream_t stream);

}  // namespace ooc_torch
