#include "cuda_functions.h"

#include <algorithm>
#include <vector>

namespace ooc_torch {
namespace {

struct Allocations {
  bool inside = false;        // the thread is in a function
  std::vector<void*> blocks;  // that the function has allocated and that are live
};
thread_local Allocations allocations;

cudaStream_t current_stream() {
  const c10::cuda::CUDAStream current = c10::cuda::getCurrentCUDAStream(static_cast<c10::DeviceIndex>(cuda_device));
  const cudaStream_t stream = current.stream();
  thread_local cudaStream_t known = nullptr;  // the default one, or one of PyTorch's, which are never destroyed
  if (stream != known && !is_external(current)) {
    ooc_core_stream_lasts(core, stream);
    known = stream;
  }
  return stream;
}

int pin_for_life(const void* address) {
  return ooc_core_pin_on(core, address, OOC_READ | OOC_WRITE, current_stream(), nullptr);
}

}  // namespace

void function_allocated(void* block) {
  if (allocations.inside) allocations.blocks.push_back(block);
}

void function_freed(void* block) {
  auto& blocks = allocations.blocks;
  const auto found = std::find(blocks.rbegin(), blocks.rend(), block);  // the youngest die first
  if (found != blocks.rend()) blocks.erase(std::prev(found.base()));
}

void refuse_forked_child() {
  TORCH_CHECK(!in_forked_child, "a forked process cannot use the CUDA memory of its parent: start processes that use CUDA with "
              "'spawn' (torch.multiprocessing.set_start_method('spawn')), or fork before CUDA is used for the first time");
}

bool cuda_capturing() { return captured(current_stream()); }
bool cuda_function_allocated() { return !allocations.blocks.empty(); }

void cuda_read(void* host, const void* memory, size_t bytes) {
  const cudaStream_t stream = current_stream();
  C10_CUDA_CHECK(cudaMemcpyAsync(host, memory, bytes, cudaMemcpyDeviceToHost, stream));
  C10_CUDA_CHECK(cudaStreamSynchronize(stream));
}
void cuda_copy(void* target, const void* memory, size_t bytes) {
  C10_CUDA_CHECK(cudaMemcpyAsync(target, memory, bytes, cudaMemcpyDeviceToDevice, current_stream()));
}

int cuda_function_begin(uint32_t id, const ooc_operand* operands, uint32_t count, bool on_host) {
  if (in_forked_child && count == 0) return OOC_NESTED;
  refuse_forked_child();
  const cudaStream_t stream = current_stream();
  const bool is_captured = captured(stream);
  const RelaxedCapture relaxed(is_captured || any_capture());
  if (is_captured) {
    for (uint32_t i = 0; i < count; ++i)
      if (const int status = pin_for_life(operands[i].address)) return status;
    return OOC_NESTED;
  }
  const int status = on_host ? ooc_core_function_begin_host(core, id, operands, count, stream)
                             : ooc_core_function_begin_on(core, id, operands, count, stream);
  if (status != OOC_OK) return status;
  allocations.inside = true;
  allocations.blocks.clear();
  return status;
}

int cuda_function_end(bool keep_allocations, const Operands& results) {
  allocations.inside = false;
  const RelaxedCapture relaxed(any_capture());
  int pinned = OOC_OK;
  for (const void* block : allocations.blocks) {
    const bool visible = std::any_of(results.begin(), results.end(), [block](const ooc_operand& r) { return r.address == block; });
    if (!visible && pinned == OOC_OK) pinned = pin_for_life(block);
  }
  allocations.blocks.clear();
  const int status = ooc_core_function_end(core, keep_allocations ? 1 : 0);
  return status != OOC_OK ? status : pinned;
}

}  // namespace ooc_torch
