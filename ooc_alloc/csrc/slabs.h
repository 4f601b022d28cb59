// Small blocks and the chunks behind them. A chunk under no block keeps its memory until somebody takes it back; slabs
// never leave the device otherwise. Guarded by the core's lock.
//
//   backed() == chunks that have memory, and those that blocks wait for; used() == chunks under blocks; while the core
//   sleeps, chunks under blocks are away: what they hold is elsewhere
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "audit_check.h"
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
        Mappings& mappings)
      : geometry_(geometry),
        device_(device),
        pool_(pool),
        streams_(streams),
        mappings_(mappings),
        heap_(geometry.slab_chunks * geometry.chunk_bytes, geometry.chunk_bytes, alignment != 0 ? alignment : 64),
        chunks_(geometry.slab_chunks) {}

  // Where a block lies; kFailed if there are no such addresses, or slabs would take more than `most_chunks`. If the
  // block is not `backed`, some of its chunks have no memory before the caller has seen to it (next_unbacked, back).
  // A block for which the stream waits for nobody comes first.
  uint64_t place(uint64_t bytes, uint64_t most_chunks, uint32_t stream, bool& backed) {
    const auto at_once = [&](uint64_t start, uint64_t size) {
      if (!streams_.on()) return true;
      for (uint64_t c = heap_.chunk_at(start), last = heap_.chunk_at(start + size - 1); c <= last; ++c)
        if (chunks_[c].chunk == kNoChunk || !streams_.comes_after(stream, chunks_[c].after)) return false;
      return true;
    };
    const uint64_t offset = heap_.allocate(bytes, at_once);
    if (offset == kFailed) return kFailed;
    const uint64_t first = heap_.chunk_at(offset), last = heap_.last_chunk(offset);
    uint64_t fresh = 0;
    for (uint64_t c = first; c <= last; ++c) fresh += chunks_[c].users == 0 ? 1 : 0;
    if (fresh > 0 && used_ + fresh > most_chunks) {
      heap_.free(offset);
      return kFailed;
    }
    backed = true;
    for (uint64_t c = first; c <= last; ++c) {
      const bool has_memory = chunks_[c].chunk != kNoChunk;
      backed &= has_memory;
      if (chunks_[c].users++ > 0) continue;
      top_ = std::max(top_, c + 1);
      ++used_;
      if (!has_memory) ++backed_;  // counted at once, so that nobody takes the chunk for unused before it has memory
    }
    return offset;
  }
  static constexpr uint64_t kFailed = SmallHeap::kFailed;
  char* address(uint64_t offset) const { return geometry_.address(geometry_.region_chunks) + offset; }

  // The first chunk of a block that has no memory yet; kFailed if all have.
  uint64_t next_unbacked(uint64_t offset) const {
    for (uint64_t c = heap_.chunk_at(offset), last = heap_.last_chunk(offset); c <= last; ++c)
      if (chunks_[c].chunk == kNoChunk) return c;
    return kFailed;
  }
  // Another thread is backing the chunk.
  bool pending(uint64_t chunk) const { return chunks_[chunk].pending; }
  void set_pending(uint64_t chunk, bool pending) { chunks_[chunk].pending = pending; }
  // Gives memory to a chunk that the caller has set pending. Returns false if the driver refuses; then it is in the
  // pool again.
  bool back(Lock& lock, uint64_t chunk, Chunk memory) {
    lock.unlock();
    const CUresult result = mappings_.map(geometry_.address(geometry_.region_chunks + chunk), &memory, 1);
    lock.lock();
    if (result != CUDA_SUCCESS) {
      pool_.give(memory);
      return false;
    }
    chunks_[chunk].chunk = memory;
    chunks_[chunk].after.add(mappings_.take_users(&memory, 1));
    return true;
  }
  // The stream waits for who had the memory of the block before. Returns false if the device is lost.
  [[nodiscard]] bool wait_for_block(uint64_t offset, uint32_t stream) {
    return !streams_.on() || wait_for_users(offset, stream);
  }
  // The block belongs to somebody from now on; or nobody got it, as something was refused.
  void begin_block(uint64_t bytes) { live_bytes_ += bytes; }
  void abandon(uint64_t offset) { give_back(offset, {}); }

  // Bytes of the block at an address; 0 if no block begins there.
  uint64_t requested(const void* address) const { return heap_.requested(offset_of(address)); }
  // The block is free when the uses are over. Returns the bytes that were asked for, 0 for no block.
  uint64_t free(const void* address, const Moments& uses) {
    const uint64_t offset = offset_of(address), bytes = heap_.requested(offset);
    if (bytes == 0) return 0;
    live_bytes_ -= bytes;
    give_back(offset, uses);
    return bytes;
  }
  // Somebody uses the block, and no function said so.
  void used(const void* address, const Moments& moments) {
    const uint64_t offset = offset_of(address);
    if (heap_.requested(offset) == 0) return;
    const uint64_t last = heap_.last_chunk(offset);
    for (uint64_t c = heap_.chunk_at(offset); c <= last; ++c) chunks_[c].after.add(moments);
  }

  // Gives the memory under one unused chunk back to the pool. Returns false if there is none, or the driver refused.
  bool reclaim_one() {
    while (!idle_.empty()) {
      const uint64_t c = idle_.back();
      SlabChunk& entry = chunks_[c];
      const bool unused = entry.users == 0 && entry.chunk != kNoChunk;
      if (unused) {
        if (!streams_.host_waits(entry.after, Edge::kUseBeforeUnmap)) return false;
        entry.after.clear();
        if (!unmap(c)) return false;
        pool_.give(entry.chunk);
        entry.chunk = kNoChunk;
        --backed_;
      }
      idle_.pop_back();
      entry.listed = false;
      if (unused) return true;
    }
    return false;
  }
  // Every chunk gives its memory back, used or not; the blocks stay known. For a core that ends, or uses host memory.
  void release_all() {
    for (uint64_t c = 0; c < top_; ++c) {
      SlabChunk& entry = chunks_[c];
      if (entry.chunk == kNoChunk) continue;
      if (unmap(c)) pool_.give(entry.chunk);
      else mappings_.lose(1);
      entry.chunk = kNoChunk;
    }
  }

  // A user reaches the memory under a block: it does not leave until as many unpins, or until nothing is in its chunks.
  // Gives the number for unpin.
  uint64_t pin(const void* address) {
    const auto [first, last] = chunks_of(address);
    for (uint64_t c = first; c <= last; ++c) ++chunks_[c].pins;
    return first << 24 | (last - first);
  }
  // Whether a user reaches the memory of its chunks.
  bool pinned(const void* address) const {
    const auto [first, last] = chunks_of(address);
    for (uint64_t c = first; c <= last; ++c)
      if (chunks_[c].pins > 0) return true;
    return false;
  }
  void unpin(uint64_t pinned) {
    const uint64_t first = pinned >> 24;
    for (uint64_t c = first; c <= first + (pinned & 0xffffff); ++c) chunks_[c].pins -= chunks_[c].pins > 0 ? 1 : 0;
  }
  // Runs of at most so many chunks under blocks, which no user reaches, hand their memory over: visit(first chunk, its
  // memory).
  template <class Visit>
  void each_leaving(uint64_t most, Visit visit) {
    const auto leaves = [this](uint64_t c) { return chunks_[c].users > 0 && chunks_[c].chunk != kNoChunk && chunks_[c].pins == 0; };
    std::vector<Chunk> memory;
    for (uint64_t c = 0; c < top_;) {
      memory.clear();
      const uint64_t first = c;
      for (; c < top_ && memory.size() < most && leaves(c); ++c) {
        memory.push_back(std::exchange(chunks_[c].chunk, kNoChunk));
        chunks_[c].away = true;
        chunks_[c].after.clear();
      }
      away_ += memory.size();
      backed_ -= memory.size();
      if (memory.empty()) ++c;
      else visit(first, memory);
    }
  }
  // The chunk has memory again, with what it held.
  void come_back(uint64_t c, Chunk memory) {
    SlabChunk& entry = chunks_[c];
    entry.chunk = memory;
    ++backed_;
    if (entry.away) --away_;
    else if (!entry.listed) idle_.push_back(c);  // its blocks were freed meanwhile
    entry.listed = entry.listed || !entry.away;
    entry.away = false;
  }

  uint64_t live_bytes() const { return live_bytes_; }
  uint64_t used() const { return used_; }
  uint64_t backed() const { return backed_; }
  uint64_t unused() const { return backed_ + away_ - used_; }
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
  void fill(ooc_stats& stats) const {
    stats.small_live_bytes = live_bytes_;
    stats.slab_bytes = backed_ * geometry_.chunk_bytes;
    stats.slab_used_bytes = used_ * geometry_.chunk_bytes;
  }
  std::string audit() const {
    AuditCheck check;
    uint64_t backed = 0, used = 0, away = 0, bytes = 0;
    for (uint64_t c = 0; c < top_; ++c) {
      backed += chunks_[c].chunk != kNoChunk ? 1 : 0;
      used += chunks_[c].users > 0 ? 1 : 0;
      away += chunks_[c].away ? 1 : 0;
    }
    heap_.each_allocation([&](uint64_t, uint64_t requested) { bytes += requested; });
    check.equal("slab chunks", backed, backed_);
    check.equal("slab chunks in use", used, used_);
    check.equal("slab chunks that are away", away, away_);
    check.equal("live bytes of slabs", bytes, live_bytes_);
    return check.text();
  }

 private:
  struct SlabChunk {
    Chunk chunk = kNoChunk;
    uint32_t users = 0;
    uint32_t pins = 0;     // of users who reach the memory
    bool pending = false;  // being backed
    bool listed = false;   // in idle_
    bool away = false;     // what it holds is elsewhere
    Moments after;         // what used the chunk, and blocks in it that were freed
  };
  [[nodiscard]] bool wait_for_users(uint64_t offset, uint32_t stream) {
    for (uint64_t c = heap_.chunk_at(offset), last = heap_.last_chunk(offset); c <= last; ++c) {
      streams_.prune(chunks_[c].after);
      if (!streams_.wait(stream, chunks_[c].after, Edge::kFreeBeforeSmall)) return false;
    }
    return true;
  }
  [[gnu::always_inline]] void give_back(uint64_t offset, const Moments& uses) {
    const uint64_t first = heap_.chunk_at(offset), last = heap_.last_chunk(offset);
    heap_.free(offset);
    for (uint64_t c = first; c <= last; ++c) {
      SlabChunk& entry = chunks_[c];
      entry.after.add(uses);
      if (--entry.users > 0) continue;
      --used_;
      entry.pins = 0;
      if (entry.away) {
        entry.away = false;
        --away_;
      } else if (entry.chunk == kNoChunk) {
        --backed_;
      } else if (!entry.listed) {
        entry.listed = true;
        idle_.push_back(c);
      }
    }
  }
  // The first and the last chunk of a block.
  std::pair<uint64_t, uint64_t> chunks_of(const void* address) const {
    const uint64_t offset = offset_of(address), first = heap_.chunk_at(offset);
    return {first, heap_.requested(offset) != 0 ? heap_.last_chunk(offset) : first};
  }
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
  uint64_t live_bytes_ = 0, backed_ = 0, used_ = 0, away_ = 0;
  uint64_t top_ = 0;            // no chunk from here on was ever used
};

}  // namespace ooc
