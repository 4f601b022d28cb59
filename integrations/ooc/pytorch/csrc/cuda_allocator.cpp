#include "cuda_allocator.h"

#include <c10/core/impl/GPUTrace.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAStream.h>

#include <pthread.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "call_memory.h"
#include "cuda_functions.h"
#include "places.h"
#include "recompute.h"
#include "splitting.h"

namespace ooc_torch {
namespace {

CudaAllocator* installed = nullptr;  // lives as long as the process

thread_local size_t not_reported = 0;  // bytes of the last allocation that failed

void delete_block(void* block) {
  if (block != nullptr && installed != nullptr) installed->free_block(block, false);
}

void leave(void*) {}  // it lies in memory that another has

// PyTorch's current stream is the thread's own, and gone before the last tensors of the thread or the process are freed.
thread_local bool thread_ends = false;
struct ThreadEnd {
  ~ThreadEnd() { thread_ends = true; }
};

// TORCH_CUDA_SANITIZER asks for these.
using Traced = void (c10::impl::PyInterpreterVTable::*)(c10::DeviceType, uintptr_t) const;
void trace(Traced event, const void* block) {
  if (const c10::impl::PyInterpreter* interpreter = c10::impl::GPUTrace::get_trace())
    (interpreter->vtable_->*event)(c10::DeviceType::CUDA, reinterpret_cast<uintptr_t>(block));
}

}  // namespace

// The base class never calls the functions for memory that it is given, as all that would call them are overridden.
CudaAllocator::CudaAllocator(ooc_core* managed, c10::DeviceIndex device)
    : CUDAPluggableAllocator([](size_t, int, cudaStream_t) -> void* { return nullptr; },
                             [](void*, size_t, int, cudaStream_t) {}),
      managed_(managed),
      device_(device) {
  const ooc_stats stats = core_stats();
  total_bytes_ = stats.device_total_bytes;
  first_budget_ = stats.budget_bytes;
  ledger_.configure(device, ooc_core_small_limit(managed));
}

void CudaAllocator::init(int) { initialized_ = true; }

void CudaAllocator::check_device(c10::DeviceIndex device) const {
  TORCH_CHECK(device == device_, "memory of cuda:", static_cast<int>(device), " is not managed: this process manages cuda:",
              static_cast<int>(device_), ", and one device only. Run a process for each device, with CUDA_VISIBLE_DEVICES or "
              "LOCAL_RANK saying which, or turn the allocator off (OOC_ALLOC=0)");
}

c10::DeviceIndex CudaAllocator::current_device() const {
  refuse_forked_child();
  c10::DeviceIndex device = -1;
  C10_CUDA_CHECK(c10::cuda::GetDevice(&device));
  check_device(device);
  return device;
}

// With a pool of PyTorch's or without, as libraries do it. The default stream cannot be captured.
bool CudaAllocator::captures(cudaStream_t stream) const {
  if (stream == nullptr) return false;
  cudaStreamCaptureStatus status{cudaStreamCaptureStatusNone};
  C10_CUDA_CHECK(cudaStreamIsCapturing(stream, &status));
  return status == cudaStreamCaptureStatusActive;
}

ooc_stats CudaAllocator::core_stats() const {
  ooc_stats stats{};
  ooc_core_read_stats(managed_, &stats);
  return stats;
}

// ---- allocating -----------------------------------------------------------------------------------------------------

c10::DataPtr CudaAllocator::allocate(size_t bytes) {
  const c10::Device device(c10::DeviceType::CUDA, current_device());
  CallMemory* memory = bytes > 0 ? CallMemory::current() : nullptr;
  if (memory != nullptr)
    if (char* place = memory->place_for(bytes)) return {place, place, &leave, device};
  void* block = bytes > 0 ? take(bytes, c10::cuda::getCurrentCUDAStream(device.index()).stream()) : nullptr;
  if (memory != nullptr) memory->allocated(bytes, block);
  return {block, block, &delete_block, device};
}

c10::DataPtr CudaAllocator::allocate_absent(size_t bytes) {
  const c10::DeviceIndex device = current_device();
  void* block = ooc_core_malloc_absent(managed_, bytes);
  if (block == nullptr) raise(ooc_last_status());
  if (places_wanted.load(std::memory_order_relaxed)) note_place(block);
  Block record{bytes, Block::round(bytes), c10::cuda::getCurrentCUDAStream(device).stream(), {0, 0}, {}, nullptr};
  record.context = ledger_.gather(native::RecordContext::STATE);
  ledger_.allocated(block, std::move(record));
  trace(&c10::impl::PyInterpreterVTable::trace_gpu_memory_allocation, block);
  return {block, block, &delete_block, c10::Device(c10::DeviceType::CUDA, device)};
}

c10::DeleterFnPtr CudaAllocator::raw_deleter() const { return &delete_block; }

void* CudaAllocator::take(size_t bytes, cudaStream_t stream) {
  const bool is_captured = captures(stream);
  const RelaxedCapture relaxed(is_captured || pools_.active());
  Block record{bytes, Block::round(bytes), stream, {0, 0}, {}, nullptr};
  const c10::cuda::CUDAStream current = c10::cuda::getCurrentCUDAStream(device_);
  record.is_external = current.stream() == stream && is_external(current);
  void* block = nullptr;
  if (const std::optional<PoolId> pool = pools_.pool_for(stream)) {
    record.pool = *pool;
    block = take_from_pool(*pool, bytes, stream, record.rounded);
  } else {
    block = is_captured ? take_ready(bytes) : take_from_core(bytes, stream);
    if (!in_slab(block)) function_allocated(block);
    if (!in_slab(block) && places_wanted.load(std::memory_order_relaxed)) note_place(block);
  }
  record.context = ledger_.gather(native::RecordContext::STATE);
  ledger_.allocated(block, std::move(record));
  trace(&c10::impl::PyInterpreterVTable::trace_gpu_memory_allocation, block);
  return block;
}

void* CudaAllocator::take_from_core(size_t bytes, cudaStream_t stream) {
  void* block = ooc_core_malloc_on(managed_, bytes, stream);
  if (block == nullptr) {
    const std::string message = ooc_last_error();
    std::vector<Pools::Discarded> spare = pools_.last_resort();
    if (!spare.empty()) {
      discard(std::move(spare));
      block = ooc_core_malloc_on(managed_, bytes, stream);
    }
    if (block == nullptr && ooc_last_status() == OOC_DRIVER_FAILURE) raise(OOC_DRIVER_FAILURE);
    // The storage of a tensor that operators use in parts: torch.load makes such ones outside of them.
    if (block == nullptr && splitting && !ooc_core_in_function(managed_)) block = ooc_core_malloc_absent(managed_, bytes);
    if (block == nullptr) out_of_memory(bytes, message);
  }
  return block;
}

// The memory is ready before it is handed out, as a captured stream cannot wait for anything outside its graph, and stays where
// it is until it is freed, as every replay uses its address. The pin waits.
void* CudaAllocator::take_ready(size_t bytes) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (pool_stream_ == nullptr) C10_CUDA_CHECK(cudaStreamCreateWithFlags(&pool_stream_, cudaStreamNonBlocking));
  }
  void* block = take_from_core(bytes, pool_stream_);
  if (const int status = ooc_core_pin(managed_, block, OOC_READ | OOC_WRITE, nullptr)) {
    ooc_core_free(managed_, block);
    raise(status);
  }
  return block;
}

void* CudaAllocator::take_from_pool(PoolId pool, size_t bytes, cudaStream_t stream, size_t& rounded) {
  if (void* again = pools_.take(pool, rounded, stream)) return again;
  void* block = nullptr;
  if (const Source source = pools_.source(pool)) {
    block = source->raw_alloc_with_stream(rounded, stream);
    if (block == nullptr) out_of_memory(bytes, "the allocator of the memory pool has no memory left");
  } else {
    block = take_ready(rounded);
  }
  pools_.add(pool, block, rounded, stream);
  return block;
}

// An operator that fails for want of memory may run in parts, so whoever knows reports it (splitting.cpp).
void CudaAllocator::out_of_memory(size_t bytes, const std::string& message) {
  if (splitting && ooc_core_in_function(managed_)) not_reported = bytes;
  else report_out_of_memory(bytes);
  const std::string text = c10::str("CUDA out of memory. Tried to allocate ", c10::CachingAllocator::format_size(bytes), ". ", message);
  if (insists) throw DoesNotFit({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, text);
  TORCH_CHECK_WITH(OutOfMemoryError, false, text);
}

void CudaAllocator::report_out_of_memory(size_t bytes) {
  const ooc_stats stats = core_stats();
  const uint64_t free_bytes = stats.budget_bytes - std::min(stats.budget_bytes, stats.pinned_bytes + stats.slab_used_bytes);
  ledger_.out_of_memory(bytes, free_bytes, ledger_.gather(native::RecordContext::NEVER));
  std::vector<native::OutOfMemoryObserver> observers;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    observers = observers_;
  }
  for (const native::OutOfMemoryObserver& observer : observers) observer(device_, bytes, stats.budget_bytes, free_bytes);
}

void* CudaAllocator::raw_alloc(size_t bytes) {
  if (bytes == 0) return nullptr;
  return raw_alloc_with_stream(bytes, c10::cuda::getCurrentCUDAStream(current_device()).stream());
}

// No operator sees what belongs to no tensor, so it stays on the device if it was allocated outside of an operator.
void* CudaAllocator::raw_alloc_with_stream(size_t bytes, cudaStream_t stream) {
  current_device();
  if (bytes == 0) return nullptr;
  void* block = take(bytes, stream);
  if (ooc_core_in_function(managed_) == 0)
    if (const int status = ooc_core_pin_on(managed_, block, OOC_READ | OOC_WRITE, stream, nullptr)) {
      free_block(block, false);
      raise(status);
    }
  return block;
}

// Data are never moved to make an address free, so only an address that a pool keeps idle could be given.
c10::DataPtr CudaAllocator::allocateWithAddress(size_t, void*) {
  TORCH_CHECK(false, "memory at an address of one's choice cannot be had from ooc_alloc");
}

// ---- freeing --------------------------------------------------------------------------------------------------------

void CudaAllocator::raw_delete(void* block) {
  if (block != nullptr) free_block(block, true);
}

void CudaAllocator::free_block(void* address, bool must_be_known) {
  const std::optional<Block> block = ledger_.freed(address);
  TORCH_CHECK(block.has_value() || !must_be_known, "this address was not allocated here, or was freed already");
  if (!block.has_value() || in_forked_child) return;
  trace(&c10::impl::PyInterpreterVTable::trace_gpu_memory_deallocation, address);
  if (!thread_ends) function_freed(address);
  if (block->pool != PoolId{0, 0}) {
    if (std::optional<Pools::Discarded> discarded = pools_.give(block->pool, address)) discard({*discarded});
    return;
  }
  const auto own = static_cast<cudaStream_t>(block->stream);
  const cudaStream_t current = thread_ends ? own : c10::cuda::getCurrentCUDAStream(device_).stream();
  static thread_local const ThreadEnd made_after_the_stream;
  if (block->is_external && block->stream != current) return discard({{address, nullptr}});
  const RelaxedCapture relaxed(pools_.active() || (!thread_ends && captures(current)));
  for (void* stream : block->other_streams) ooc_core_record_use(managed_, address, stream);
  // What lingers is freed later, by somebody who does not know the stream.
  if (recomputing.load(std::memory_order_relaxed)) ooc_core_record_use(managed_, address, block->stream);
  ooc_core_free_on(managed_, address, block->stream);
}

// Work that uses these blocks may be under way on streams that nobody told us of, such as a replayed graph, or that may be
// destroyed, so everything has to be over first. That cannot be waited for while a stream is captured.
void CudaAllocator::discard(std::vector<Pools::Discarded> blocks) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (blocks.empty() && discarded_.empty()) return;
    discarded_.insert(discarded_.end(), blocks.begin(), blocks.end());
    if (pools_.active()) return;
    blocks.swap(discarded_);
    discarded_.clear();
  }
  cudaDeviceSynchronize();  // an error is the program's own, and comes up again at its next call
  for (const Pools::Discarded& block : blocks) {
    if (block.source) block.source->raw_delete(block.address);
    else ooc_core_free_on(managed_, block.address, pool_stream_);
  }
}

void CudaAllocator::emptyCache(PoolId) {
  if (pools_.active()) return;
  discard({});
  ooc_core_release_cached(managed_);
}

void CudaAllocator::enable(bool value) {
  if (value) return;
  TORCH_WARN_ONCE("torch.cuda.memory.caching_allocator_enable(False) has no effect: ooc_alloc manages the memory");
}

void CudaAllocator::recordStream(const c10::DataPtr& data, c10::cuda::CUDAStream stream) {
  void* address = data.get();
  if (address == nullptr || data.get_deleter() != &delete_block) return;  // not ours
  const std::optional<Block> block = ledger_.used_on(address, stream.stream());
  if (!block.has_value()) return;
  if (block->pool != PoolId{0, 0}) {
    pools_.share(block->pool, address);
  } else {
    ooc_core_record_use(managed_, address, stream.stream());
  }
}

// ---- private pools --------------------------------------------------------------------------------------------------

void CudaAllocator::beginAllocateToPool(c10::DeviceIndex device, PoolId pool, Pools::Filter filter) {
  check_device(device);
  forget_iteration();  // what is made again while a stream is captured would be made by each replay
  pools_.begin(pool, std::move(filter));
}

void CudaAllocator::endAllocateToPool(c10::DeviceIndex, PoolId pool) {
  pools_.end(pool);
  discard({});
}

void CudaAllocator::markCaptureBegin(c10::DeviceIndex) {}  // beginAllocateToPool and endAllocateToPool say all we need
void CudaAllocator::markCaptureEnd(c10::DeviceIndex) {}

void CudaAllocator::releasePool(c10::DeviceIndex, PoolId pool) { discard(pools_.drop_user(pool)); }
int CudaAllocator::getPoolUseCount(c10::DeviceIndex, PoolId pool) { return pools_.users(pool); }

void CudaAllocator::createOrIncrefPool(c10::DeviceIndex device, PoolId pool, Source source) {
  check_device(device);
  pools_.add_user(pool, std::move(source));
}

void CudaAllocator::setUseOnOOM(c10::DeviceIndex, PoolId pool, bool use) { pools_.use_on_out_of_memory(pool, use); }
void CudaAllocator::setNoSplit(c10::DeviceIndex, PoolId) {}  // blocks are never split

bool CudaAllocator::checkPoolLiveAllocations(c10::DeviceIndex, PoolId pool, const std::unordered_set<void*>& expected) {
  return pools_.live_are(pool, expected);
}

std::shared_ptr<native::AllocatorState> CudaAllocator::getCheckpointState(c10::DeviceIndex, PoolId pool) {
  return pools_.state(pool);
}

native::CheckpointDelta CudaAllocator::setCheckpointPoolState(c10::DeviceIndex, std::shared_ptr<native::AllocatorState> wanted) {
  const auto state = std::dynamic_pointer_cast<Pools::State>(wanted);
  TORCH_CHECK(state != nullptr, "this state of a memory pool was not made by ooc_alloc");
  const auto [freed, live] = pools_.restore(*state);
  native::CheckpointDelta delta;
  for (void* address : freed) {
    ledger_.freed(address);
    delta.ptrs_freed.push_back(address);
  }
  for (const auto& [address, block] : live) {
    ledger_.allocated(address, {block.bytes, block.bytes, block.stream, state->id, {}, nullptr});
    delta.dataptrs_allocd.emplace_back(address, address, &delete_block, c10::Device(c10::DeviceType::CUDA, device_));
  }
  return delta;
}

// ---- functions ------------------------------------------------------------------------------------------------------

bool any_capture() { return installed != nullptr && installed->any_capture(); }
void cuda_report_out_of_memory() {
  if (const size_t bytes = std::exchange(not_reported, 0)) installed->report_out_of_memory(bytes);
}
c10::DataPtr cuda_allocate_absent(size_t bytes) { return installed->allocate_absent(bytes); }
bool cuda_is_block(const c10::DataPtr& memory) { return memory.get_deleter() == &delete_block; }
bool captured(cudaStream_t stream) { return installed != nullptr && installed->captures(stream); }

void install_cuda_allocator(ooc_core* managed, c10::DeviceIndex device) {
  TORCH_CHECK(installed == nullptr, "the allocator for CUDA is installed already; it stays for the life of the process");
  // PyTorch frees memory until its very end, so this must outlive every other object.
  static auto* allocator = new std::shared_ptr<CudaAllocator>(std::make_shared<CudaAllocator>(managed, device));
  torch::cuda::CUDAPluggableAllocator::changeCurrentAllocator(*allocator);  // refuses if CUDA is initialised
  c10::SetAllocator(c10::DeviceType::CUDA, allocator->get(), 100);
  installed = allocator->get();
  pthread_atfork(nullptr, nullptr, [] { in_forked_child = true; });
}

}  // namespace ooc_torch
