// PyTorch's allocator for the memory of one CUDA device: a subclass of CUDAPluggableAllocator that fills every
// function, so that torch.cuda.memory, CUDA graphs, MemPool and cudnn.benchmark work as with PyTorch's own allocator.
//
//   allocate, free, record_stream   the core, on the current stream
//   statistics, history             cuda_ledger.h
//   private pools                   cuda_pools.h
//
// Refused, with a reason: memory of other devices, sharing with other processes (CUDA IPC), peer access.
#pragma once

#include <torch/csrc/cuda/CUDAPluggableAllocator.h>

#include <mutex>
#include <string>
#include <vector>

#include "adapter.h"
#include "cuda_ledger.h"
#include "cuda_pools.h"

namespace ooc_torch __attribute__((visibility("hidden"))) {

class CudaAllocator final : public torch::cuda::CUDAPluggableAllocator::CUDAPluggableAllocator {
 public:
  CudaAllocator(ooc_core* managed, c10::DeviceIndex device);

  // c10::Allocator and c10::DeviceAllocator
  c10::DataPtr allocate(size_t bytes) override;
  c10::DeleterFnPtr raw_deleter() const override;
  bool initialized() override { return initialized_; }
  void emptyCache(PoolId pool = {0, 0}) override;
  void recordStream(const c10::DataPtr& data, c10::cuda::CUDAStream stream) override;
  native::DeviceStats getDeviceStats(c10::DeviceIndex device) override;
  void resetAccumulatedStats(c10::DeviceIndex device) override;
  void resetPeakStats(c10::DeviceIndex device) override;
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override;

  // CUDAAllocator. A function that some supported version of PyTorch lacks has no `override`.
  void* raw_alloc(size_t bytes) override;
  void* raw_alloc_with_stream(size_t bytes, cudaStream_t stream) override;
  void raw_delete(void* block) override;
  void init(int devices) override;
  double getMemoryFraction(c10::DeviceIndex device) override;
  void setMemoryFraction(double fraction, c10::DeviceIndex device) override;
  std::vector<native::StreamSegmentSize> getExpandableSegmentSizes(c10::DeviceIndex device) override;
  void enable(bool value) override;
  bool isEnabled() const override { return true; }
  void cacheInfo(c10::DeviceIndex device, size_t* largest) override;
  void* getBaseAllocation(void* address, size_t* bytes) override;
  native::SnapshotInfo snapshot(PoolId pool, bool include_traces = true) override;
  void beginAllocateToPool(c10::DeviceIndex device, PoolId pool, Pools::Filter filter) override;
  void endAllocateToPool(c10::DeviceIndex device, PoolId pool) override;
  void markCaptureBegin(c10::DeviceIndex device);
  void markCaptureEnd(c10::DeviceIndex device);
  void releasePool(c10::DeviceIndex device, PoolId pool) override;
  int getPoolUseCount(c10::DeviceIndex device, PoolId pool) override;
  void createOrIncrefPool(c10::DeviceIndex device, PoolId pool, Source source) override;
  void setUseOnOOM(c10::DeviceIndex device, PoolId pool, bool use) override;
  void setNoSplit(c10::DeviceIndex device, PoolId pool) override;
  bool checkPoolLiveAllocations(c10::DeviceIndex device, PoolId pool, const std::unordered_set<void*>& expected) override;
  std::shared_ptr<native::AllocatorState> getCheckpointState(c10::DeviceIndex device, PoolId pool) override;
  native::CheckpointDelta setCheckpointPoolState(c10::DeviceIndex device, std::shared_ptr<native::AllocatorState> state) override;
  native::ShareableHandle shareIpcHandle(void* block) override;
  std::shared_ptr<void> getIpcDevPtr(std::string handle) override;
  bool isHistoryEnabled() override;
  std::shared_ptr<c10::GatheredContext> getContextForPointer(const void* address);
  void recordHistory(bool enabled, native::CreateContextFn recorder, size_t most_entries, native::RecordContext when,
                     bool clear, const std::vector<std::string>& skipped) override;
  void recordAnnotation(const std::vector<std::pair<std::string, std::string>>& metadata) override;
  void pushCompileContext(std::string& context) override;
  void popCompileContext() override;
  void setUserMetadata(const std::string& metadata) override;
  std::string getUserMetadata() override;
  void attachOutOfMemoryObserver(native::OutOfMemoryObserver observer) override;
#ifdef OOC_HAS_OOM_REJECTION
  void attachOomRejectionObserver(native::OomRejectionObserver observer) override;
#endif
  void attachAllocatorTraceTracker(native::AllocatorTraceTracker tracker) override;
  void enablePeerAccess(c10::DeviceIndex device, c10::DeviceIndex peer) override;
  cudaError_t memcpyAsync(void* target, int target_device, const void* source, int source_device, size_t bytes,
                          cudaStream_t stream, bool peer_access) override;
  c10::DataPtr allocateWithAddress(size_t bytes, void* address);
  std::string name() override { return "ooc_alloc"; }

  bool any_capture() const { return pools_.active(); }
  bool captures(cudaStream_t stream) const;
  void free_block(void* block, bool must_be_known);
  c10::DataPtr allocate_absent(size_t bytes);
  void report_out_of_memory(size_t bytes);

 private:
  void* take(size_t bytes, cudaStream_t stream);
  void* take_from_core(size_t bytes, cudaStream_t stream);
  void* take_ready(size_t bytes);
  void* take_from_pool(PoolId pool, size_t bytes, cudaStream_t stream, size_t& rounded);
  [[noreturn]] void out_of_memory(size_t bytes, const std::string& message);
  void discard(std::vector<Pools::Discarded> blocks);
  void check_device(c10::DeviceIndex device) const;
  c10::DeviceIndex current_device() const;
  ooc_stats core_stats() const;

  ooc_core* managed_;
  c10::DeviceIndex device_;
  uint64_t total_bytes_, first_budget_;
  Ledger ledger_;
  Pools pools_;
  std::mutex mutex_;                         // guards what follows
  std::vector<Pools::Discarded> discarded_;  // they are given back when no stream is captured
  std::vector<native::OutOfMemoryObserver> observers_;
  cudaStream_t pool_stream_ = nullptr;       // memory for captured streams is made ready on it; it is never captured
};

// Makes PyTorch use it. Throws if PyTorch has initialised CUDA already.
void install_cuda_allocator(ooc_core* managed, c10::DeviceIndex device);

}  // namespace ooc_torch
