// What operators ask of the part for CUDA devices (cuda_allocator.cpp, cuda_functions.cpp). An adapter for a CPU build of
// PyTorch has nothing of it, and on_cuda() is false there.
#pragma once

#include <ATen/Context.h>

#include <atomic>
#include <utility>

#include "operands.h"

namespace ooc_torch __attribute__((visibility("hidden"))) {

// Begins a function on the current stream. It also returns OOC_NESTED while that stream is captured into a graph. The
// operands then stay on the device until they are freed, as every replay uses their addresses.
int cuda_function_begin(uint32_t id, const ooc_operand* operands, uint32_t count, bool on_host);
// Ends it. What it has allocated and does not return, but what lives on, belongs to a library (cuBLAS workspaces). It stays
// on the device until it is freed.
int cuda_function_end(bool keep_allocations, const Operands& results);
// Whether the thread's function has allocated anything; if not, its results need not be looked at.
bool cuda_function_allocated();
// Tells PyTorch's observers of the last allocation of this thread's functions that failed.
void cuda_report_out_of_memory();
// Whether the current stream is captured into a graph.
bool cuda_capturing();
// Whether it is a block of the allocator for the device.
bool cuda_is_block(const c10::DataPtr& memory);

// What a kernel that picks its algorithm by what memory it gets is told where it gets none, in place of PyTorch's error: it
// would take that one for a reason to pick another algorithm, with other bits.
struct DoesNotFit : c10::Error {
  using c10::Error::Error;
};
inline std::atomic<bool> rounding_allowed{false};  // the setting `split` allows other bits
inline thread_local bool insists = false;          // this thread runs such a kernel

// Runs such a kernel. Throws PyTorch's error where it gets no memory. With cudnn.benchmark it is meant to try what it can get.
template <class Kernel>
void run_insisting(Kernel kernel) {
  const bool before = std::exchange(insists, !rounding_allowed && !at::globalContext().benchmarkCuDNN());
  struct Restore {
    bool before;
    ~Restore() { insists = before; }
  } const restore{before};
  try {
    kernel();
  } catch (const DoesNotFit& error) {
    TORCH_CHECK_WITH(OutOfMemoryError, false, error.what_without_backtrace());
  }
}

// Copies of device memory, on the current stream: to the host, which waits for it; and within the device.
void cuda_read(void* host, const void* memory, size_t bytes);
void cuda_copy(void* target, const void* memory, size_t bytes);
// A variable of which nothing is on the device yet (ooc_core_malloc_absent). Throws if it cannot be had.
c10::DataPtr cuda_allocate_absent(size_t bytes);

}  // namespace ooc_torch
