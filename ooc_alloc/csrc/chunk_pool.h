// Physical chunks: created once through the driver, recycled for ever, never more than the budget allows.
//
// Invariant: created() == free() + chunks that callers hold. A chunk is an index; its driver handle never leaves here.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "driver.h"
#include "free_extents.h"

namespace ooc {

using Chunk = int32_t;  // index into the pool; negative: none
constexpr Chunk kNoChunk = -1;

class ChunkPool {
 public:
  ChunkPool(const Driver& driver, int device, uint64_t chunk_bytes, uint64_t limit_chunks)
      : driver_(driver), chunk_bytes_(chunk_bytes), limit_(limit_chunks), configured_limit_(limit_chunks) {
    handles_.reserve(limit_chunks);  // they are read without the lock: the vector must not move, and no limit is higher
    properties_ = memory_at({CU_MEM_LOCATION_TYPE_DEVICE, device});
  }

  // Chunks that can be had without taking them from somebody: free ones and those not created yet.
  uint64_t available() const { return free_chunks_ + (limit_ > created_ ? limit_ - created_ : 0); }
  uint64_t free() const { return free_chunks_; }
  uint64_t created() const { return created_; }
  uint64_t limit() const { return limit_; }
  uint64_t configured_limit() const { return configured_limit_; }
  bool lowered() const { return limit_ < configured_limit_; }
  uint64_t created_peak() const { return created_peak_; }
  uint64_t create_calls() const { return create_calls_; }

  // Precondition: count <= available(). False if the driver refuses; then nothing is taken and limit() has shrunk to
  // what the device really has.
  // Chunks that were created one after another stay together where they can: the system may map neighbours as one.
  bool take(uint32_t count, Chunk* out) {
    for (uint32_t taken = 0; taken < count;) {
      const auto [first, found] = free_.take_up_to(count - taken);
      free_chunks_ -= found;
      for (uint64_t i = 0; i < found; ++i) out[taken++] = static_cast<Chunk>(first + i);
      if (found > 0) continue;
      const Chunk chunk = created_ < limit_ ? create() : kNoChunk;
      if (chunk == kNoChunk) {
        limit_ = std::min(limit_, created_);  // the device has less than the budget says
        while (taken > 0) keep(out[--taken]);
        return false;
      }
      out[taken++] = chunk;
    }
    return true;
  }
  // Asks the driver once more where it had lowered the limit. Returns false if it gives no chunk now either.
  bool recover() {
    if (!lowered()) return false;
    const Chunk chunk = create();
    if (chunk == kNoChunk) return false;
    keep(chunk);
    limit_ = configured_limit_;
    return true;
  }
  // A chunk beyond a lowered limit goes back to the driver, any other one is kept.
  void give(Chunk chunk) {
    if (created_ > limit_) release(chunk);
    else keep(chunk);
  }
  // Another limit, at most the one it was made with. Chunks beyond it go back as they are given, free ones by trim().
  void set_limit(uint64_t chunks) { limit_ = configured_limit_ = chunks; }
  void trim() {
    while (created_ > limit_ && free_chunks_ > 0) release_one();
  }
  // Gives free chunks back to the driver. A limit that it had lowered is tried again.
  void release_free() {
    while (free_chunks_ > 0) release_one();
    limit_ = configured_limit_;
  }

  CUmemGenericAllocationHandle handle(Chunk chunk) const { return handles_[static_cast<size_t>(chunk)]; }

 private:
  Chunk create() {
    CUmemGenericAllocationHandle handle = 0;
    const auto attempt = [&] {
      ++create_calls_;
      return driver_.cuMemCreate(&handle, chunk_bytes_, &properties_, 0);
    };
    if (driver_.retried(Counted::kMemCreate, attempt) != CUDA_SUCCESS) return kNoChunk;
    Chunk chunk;
    if (unused_indexes_.empty()) {
      chunk = static_cast<Chunk>(handles_.size());
      handles_.push_back(handle);
    } else {
      chunk = unused_indexes_.back();
      unused_indexes_.pop_back();
      handles_[static_cast<size_t>(chunk)] = handle;
    }
    created_peak_ = std::max(created_peak_, ++created_);
    return chunk;
  }
  void keep(Chunk chunk) {
    free_.give(static_cast<uint64_t>(chunk), 1);
    ++free_chunks_;
  }
  void release_one() {
    --free_chunks_;
    release(static_cast<Chunk>(free_.take_smallest(1)));
  }
  void release(Chunk chunk) {
    driver_.cuMemRelease(handles_[static_cast<size_t>(chunk)]);
    unused_indexes_.push_back(chunk);
    --created_;
  }

  const Driver& driver_;
  CUmemAllocationProp properties_{};
  uint64_t chunk_bytes_;
  uint64_t limit_, configured_limit_;
  uint64_t created_ = 0;
  uint64_t created_peak_ = 0;
  uint64_t create_calls_ = 0;
  std::vector<CUmemGenericAllocationHandle> handles_;
  FreeExtents free_;  // of indexes
  uint64_t free_chunks_ = 0;
  std::vector<Chunk> unused_indexes_;
};

}  // namespace ooc
