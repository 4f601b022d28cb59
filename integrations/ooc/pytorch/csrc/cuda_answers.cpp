// What PyTorch asks of its allocator beside memory: figures, limits, history, and what is refused.
#include <c10/cuda/CUDAFunctions.h>

#include <algorithm>

#include "cuda_allocator.h"
#include "cuda_functions.h"

namespace ooc_torch {

native::DeviceStats CudaAllocator::getDeviceStats(c10::DeviceIndex device) {
  return device == device_ ? ledger_.stats(core_stats()) : native::DeviceStats{};
}

void CudaAllocator::resetAccumulatedStats(c10::DeviceIndex device) {
  if (device == device_) ledger_.reset_accumulated(core_stats());
}

void CudaAllocator::resetPeakStats(c10::DeviceIndex device) {
  if (device == device_) ledger_.reset_peak(core_stats());
}

// Returns what can be had without moving anything, and the budget.
std::pair<size_t, size_t> CudaAllocator::getMemoryInfo(c10::DeviceIndex device) {
  check_device(device);
  const ooc_stats stats = core_stats();
  const uint64_t taken = stats.device_bytes - std::min(stats.device_bytes, stats.free_bytes + stats.cached_bytes +
                                                                               stats.slab_bytes - stats.slab_used_bytes);
  return {stats.budget_bytes - std::min(stats.budget_bytes, taken), stats.budget_bytes};
}

double CudaAllocator::getMemoryFraction(c10::DeviceIndex device) {
  check_device(device);
  return static_cast<double>(core_stats().budget_bytes) / static_cast<double>(total_bytes_);
}

// The budget is an upper limit: a fraction lowers it, and 1.0 brings it back.
void CudaAllocator::setMemoryFraction(double fraction, c10::DeviceIndex device) {
  check_device(device);
  TORCH_CHECK(fraction > 0 && fraction <= 1, "a memory fraction is above 0 and at most 1, not ", fraction);
  const auto wanted = static_cast<uint64_t>(fraction * static_cast<double>(total_bytes_));
  if (const int status = ooc_core_set_budget(managed_, std::min(wanted, first_budget_))) raise(status);
  ooc_core_forget_plans(managed_);
}

std::vector<native::StreamSegmentSize> CudaAllocator::getExpandableSegmentSizes(c10::DeviceIndex) { return {}; }

// Tells cuDNN, which chooses a workspace by it, how large a single allocation may be.
void CudaAllocator::cacheInfo(c10::DeviceIndex device, size_t* largest) {
  check_device(device);
  const ooc_stats stats = core_stats();
  *largest = stats.budget_bytes - std::min(stats.budget_bytes, stats.pinned_bytes + stats.slab_used_bytes);
}

void* CudaAllocator::getBaseAllocation(void* address, size_t* bytes) {
  const auto block = ledger_.around(address);
  TORCH_CHECK(block.has_value(), "this address lies in no allocation of ooc_alloc");
  if (bytes != nullptr) *bytes = block->second.rounded;
  return block->first;
}

native::SnapshotInfo CudaAllocator::snapshot(PoolId pool, bool include_traces) {
  return ledger_.snapshot(pool, pools_.idle(), include_traces);
}

bool CudaAllocator::isHistoryEnabled() { return ledger_.records_history(); }

std::shared_ptr<c10::GatheredContext> CudaAllocator::getContextForPointer(const void* address) {
  const auto block = ledger_.around(address);
  return block.has_value() ? block->second.context : nullptr;
}

void CudaAllocator::recordHistory(bool enabled, native::CreateContextFn recorder, size_t most_entries,
                                  native::RecordContext when, bool clear, const std::vector<std::string>& skipped) {
  ledger_.record_history(enabled, recorder, most_entries, when, clear, skipped);
}

void CudaAllocator::recordAnnotation(const std::vector<std::pair<std::string, std::string>>& metadata) {
  ledger_.annotate(metadata);
}

void CudaAllocator::pushCompileContext(std::string& context) { Ledger::compile_contexts().push_back(context); }

void CudaAllocator::popCompileContext() {
  if (!Ledger::compile_contexts().empty()) Ledger::compile_contexts().pop_back();
}

void CudaAllocator::setUserMetadata(const std::string& metadata) { Ledger::user_metadata() = metadata; }
std::string CudaAllocator::getUserMetadata() { return Ledger::user_metadata(); }

void CudaAllocator::attachOutOfMemoryObserver(native::OutOfMemoryObserver observer) {
  std::lock_guard<std::mutex> lock(mutex_);
  observers_.push_back(std::move(observer));
}

#ifdef OOC_HAS_OOM_REJECTION
void CudaAllocator::attachOomRejectionObserver(native::OomRejectionObserver) {}  // nothing is rejected beforehand
#endif

void CudaAllocator::attachAllocatorTraceTracker(native::AllocatorTraceTracker tracker) { ledger_.track(std::move(tracker)); }

// ---- other devices, other processes ---------------------------------------------------------------------------------

native::ShareableHandle CudaAllocator::shareIpcHandle(void*) {
  TORCH_CHECK(false, "memory of ooc_alloc cannot be shared with other processes (CUDA IPC), as it may leave the device: "
                     "send a copy, such as tensor.cpu()");
}

std::shared_ptr<void> CudaAllocator::getIpcDevPtr(std::string) {
  TORCH_CHECK(false, "memory of another process (CUDA IPC) cannot be opened under ooc_alloc: send a copy, such as tensor.cpu()");
}

void CudaAllocator::enablePeerAccess(c10::DeviceIndex device, c10::DeviceIndex peer) {
  TORCH_CHECK(false, "peer access from cuda:", static_cast<int>(device), " to cuda:", static_cast<int>(peer),
              " is not supported by ooc_alloc: it manages one device in a process");
}

cudaError_t CudaAllocator::memcpyAsync(void* target, int target_device, const void* source, int source_device, size_t bytes,
                                       cudaStream_t stream, bool) {
  if (target_device == source_device) return cudaMemcpyAsync(target, source, bytes, cudaMemcpyDeviceToDevice, stream);
  return cudaMemcpyPeerAsync(target, target_device, source, source_device, bytes, stream);
}

}  // namespace ooc_torch
