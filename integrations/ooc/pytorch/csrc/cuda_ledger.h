// What PyTorch keeps about its memory: statistics, snapshots and history in its own terms, for torch.cuda.memory.
//
//   allocated, active   bytes of live blocks, each rounded up to 512, on the device or swapped out
//   requested           the same, not rounded
//   reserved            device memory that the core holds. So allocated may be more than reserved
//   small, large        blocks up to OOC_SMALL_LIMIT, and larger ones
//
// Thread-safe. Nothing here calls the core or the device; frames of the Python stack are taken by the caller.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/util/ApproximateClock.h>

#include <atomic>
#include <deque>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "ooc_alloc.h"

namespace ooc_torch __attribute__((visibility("hidden"))) {

namespace native = c10::cuda::CUDACachingAllocator;

struct Block {
  size_t requested = 0, rounded = 0;  // bytes
  void* stream = nullptr;             // the stream that it was allocated for
  c10::MempoolId_t pool{0, 0};        // {0, 0}: none
  std::vector<void*> other_streams;   // that record_stream named
  std::shared_ptr<c10::GatheredContext> context;
  bool is_external = false;           // the stream is none of PyTorch's: the program may have destroyed it since

  static size_t round(size_t bytes) { return (bytes + 511) / 512 * 512; }
};

// A block that a pool keeps for its next allocation.
struct IdleBlock {
  void* address;
  size_t bytes;
  void* stream;
  c10::MempoolId_t pool;
};

class Ledger {
 public:
  using Trace = native::TraceEntry;

  void configure(c10::DeviceIndex device, size_t small_limit_bytes) {
    device_ = device;
    small_limit_ = small_limit_bytes;
  }

  void allocated(void* address, Block block);
  // These return nothing if no such block is live.
  std::optional<Block> freed(void* address);
  std::optional<Block> used_on(void* address, void* stream);
  // Returns the block that an address lies in.
  std::optional<std::pair<void*, Block>> around(const void* address) const;
  void out_of_memory(size_t bytes, size_t free_bytes, std::shared_ptr<c10::GatheredContext> context);

  // What PyTorch calls reserved is the device memory that the core holds, as its statistics say.
  native::DeviceStats stats(const ooc_stats& core) const;
  void reset_accumulated(const ooc_stats& core);
  void reset_peak(const ooc_stats& core);

  // Makes a snapshot of one pool, or of everything for {0, 0}; `idle` are the blocks that pools keep.
  native::SnapshotInfo snapshot(c10::MempoolId_t pool, const std::vector<IdleBlock>& idle, bool include_traces);
  void record_history(bool enabled, native::CreateContextFn recorder, size_t most_entries, native::RecordContext when,
                      bool clear, const std::vector<std::string>& skipped);
  bool records_history() const;
  // Returns the calling thread's frames if they are wanted at this level, or null. It calls Python: no lock may be held.
  std::shared_ptr<c10::GatheredContext> gather(native::RecordContext level) const;
  void track(native::AllocatorTraceTracker tracker);
  void annotate(const std::vector<std::pair<std::string, std::string>>& metadata);

  static std::string& user_metadata();  // of the calling thread
  static std::vector<std::string>& compile_contexts();

 private:
  enum Kind : size_t { kAll = 0, kSmall = 1, kLarge = 2 };
  Kind kind(const Block& block) const { return block.requested <= small_limit_ ? kSmall : kLarge; }
  void record(Trace::Action action, size_t address, size_t bytes, void* stream, c10::MempoolId_t pool,
              std::shared_ptr<c10::GatheredContext> context);
  native::SegmentInfo segment(size_t address, size_t bytes, void* stream, c10::MempoolId_t pool) const;

  mutable std::mutex mutex_;
  c10::DeviceIndex device_ = 0;
  size_t small_limit_ = 0;
  std::unordered_map<void*, Block> blocks_;
  native::DeviceStats stats_{};
  uint64_t peak_at_reset_ = 0, reserved_at_reset_ = 0, created_at_reset_ = 0;

  bool recording_ = false;
  native::CreateContextFn recorder_ = nullptr;
  std::atomic<native::RecordContext> when_{native::RecordContext::NEVER};  // read without the lock on the hot path
  size_t most_entries_ = 1;
  std::unordered_set<int> skipped_;
  std::deque<Trace> history_;
  std::vector<native::AllocatorTraceTracker> trackers_;
  std::vector<c10::CachingDeviceAllocator::AnnotationEntry> annotations_;
  c10::ApproximateClockToUnixTimeConverter clock_;
};

}  // namespace ooc_torch
