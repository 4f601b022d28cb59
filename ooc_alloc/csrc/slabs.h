// Small blocks and the chunks behind them. A chunk under no block keeps its memory until somebody takes it back; slabs
// never leave the device otherwise. Guarded by the core's lock.
//
//   backed() == chunks that have memory, and those that blocks wait for; used() == chunks under blocks
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "chunk_pool.h"
#include "device.h"
#include "geometry.h"
#include "mappings.h"
#include "small_heap.h"
#include "streams.h"

namespace ooc {

class Slabs {
 public:
  Slabs(const Geometry& geometry, uint64_t alignment, Device& device, ChunkPool& pool, Streams& streams,
        Mappings& mappings);
  Slabs(const Slabs&) = delete;
  Slabs& operator=(const Slabs&) = delete;

  // Where a block lies; kFailed if there are no such addresses, or slabs would take more than `most_chunks`. If the
  // block is not `backed`, some of its chunks have no memory before the caller has seen to it (next_unbacked, back).
  uint64_t place(uint64_t bytes, uint64_t most_chunks, bool& backed);
  static constexpr uint64_t kFailed = SmallHeap::kFailed;
  char* address(uint64_t offset) const { return geometry_.address(geometry_.region_chunks) + offset; }

  // The first chunk of a block that has no memory yet; kFailed if all have.
  uint64_t next_unbacked(uint64_t offset) const {
    for (uint64_t c = heap_.first_chunk(offset), last = heap_.last_chunk(offset); c <= last; ++c)
      if (chunks_[c].chunk == kNoChunk) return c;
    return kFailed;
  }
  // Another thread is backing the chunk.
  bool pending(uint64_t chunk) const { return chunks_[chunk].pending; }
  void set_pending(uint64_t chunk, bool pending) { chunks_[chunk].pending = pending; }
  // Gives memory to a chunk that the caller has set pending. Returns false if the driver refuses; then it is in the
  // pool again.
  bool back(Lock& lock, uint64_t chunk, Chunk memory);
  // The stream waits for who had the memory of the block before. Returns false if the device is lost.
  [[nodiscard]] bool wait_for_block(uint64_t offset, uint32_t stream) {
    return !streams_.on() || wait_for_users(offset, stream);
  }
  // The block belongs to somebody from now on; or nobody got it, as something was refused.
  void begin_block(uint64_t bytes) { live_bytes_ += bytes; }
  void abandon(uint64_t offset);

  // Bytes of the block at an address; 0 if no block begins there.
  uint64_t requested(const void* address) const { return heap_.requested(offset_of(address)); }
  // The block is free when the uses are over. Returns the bytes that were asked for, 0 for no block.
  uint64_t free(const void* address, const Moments& uses);
  // Somebody uses the block, and no function said so.
  void used(const void* address, const Moments& moments);

  // Gives the memory under one unused chunk back to the pool. Returns false if there is none, or the driver refused.
  bool reclaim_one();
  // Every chunk gives its memory back, used or not; the blocks stay known. For a core that ends, or uses host memory.
  void release_all();

  uint64_t live_bytes() const { return live_bytes_; }
  uint64_t used() const { return used_; }
  uint64_t backed() const { return backed_; }
  uint64_t unused() const { return backed_ - used_; }
  // visit(address) for every chunk under a block.
  template <class Visit>
  void each_used_chunk(Visit visit) const {
    for (uint64_t c = 0; c < top_; ++c)
      if (chunks_[c].users > 0 && chunks_[c].chunk != kNoChunk) visit(geometry_.address(geometry_.region_chunks + c));
  }
  // visit(chunk) for every chunk of the pool that is held.
  template <class Visit>
  void each_held(Visit visit) const {
    for (uint64_t c = 0; c < top_; ++c)
      if (chunks_[c].chunk != kNoChunk) visit(chunks_[c].chunk);
  }
  void fill(ooc_stats& stats) const;
  std::string audit() const;

 private:
  struct SlabChunk {
    Chunk chunk = kNoChunk;
    uint32_t users = 0;
    bool pending = false;  // being backed
    bool listed = false;   // in idle_
    Moments after;         // what used the chunk, and blocks in it that were freed
  };
  [[nodiscard]] bool wait_for_users(uint64_t offset, uint32_t stream);
  inline void give_back(uint64_t offset, const Moments& uses);
  uint64_t offset_of(const void* address) const {
    return static_cast<uint64_t>(static_cast<const char*>(address) - this->address(0));
  }
  bool unmap(uint64_t chunk) {
    return device_.unmap(geometry_.address(geometry_.region_chunks + chunk), geometry_.chunk_bytes) == CUDA_SUCCESS;
  }

  const Geometry& geometry_;
  Device& device_;
  ChunkPool& pool_;
  Streams& streams_;
  Mappings& mappings_;
  SmallHeap heap_;
  std::vector<SlabChunk> chunks_;
  std::vector<uint64_t> idle_;  // backed, perhaps used again by now
  uint64_t live_bytes_ = 0, backed_ = 0, used_ = 0;
  uint64_t top_ = 0;            // no chunk from here on was ever used
};

}  // namespace ooc
