#include "slabs.h"

#include <algorithm>

#include "audit_check.h"

namespace ooc {

Slabs::Slabs(const Geometry& geometry, uint64_t alignment, Device& device, ChunkPool& pool, Streams& streams,
             Mappings& mappings)
    : geometry_(geometry),
      device_(device),
      pool_(pool),
      streams_(streams),
      mappings_(mappings),
      heap_(geometry.slab_chunks * geometry.chunk_bytes, geometry.chunk_bytes, alignment != 0 ? alignment : 64),
      chunks_(geometry.slab_chunks) {}

uint64_t Slabs::place(uint64_t bytes, uint64_t most_chunks, bool& backed) {
  const uint64_t offset = heap_.allocate(bytes);
  if (offset == kFailed) return kFailed;
  const uint64_t first = heap_.first_chunk(offset), last = heap_.last_chunk(offset);
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
    if (!has_memory) ++backed_;  // so that it is not taken for idle before it is backed
  }
  return offset;
}

bool Slabs::back(Lock& lock, uint64_t c, Chunk memory) {
  lock.unlock();
  const CUresult result = mappings_.map(geometry_.address(geometry_.region_chunks + c), &memory, 1);
  lock.lock();
  if (result != CUDA_SUCCESS) {
    pool_.give(memory);
    return false;
  }
  chunks_[c].chunk = memory;
  chunks_[c].after.add(mappings_.take_users(&memory, 1));
  return true;
}

bool Slabs::wait_for_users(uint64_t offset, uint32_t stream) {
  for (uint64_t c = heap_.first_chunk(offset), last = heap_.last_chunk(offset); c <= last; ++c) {
    streams_.prune(chunks_[c].after);
    if (!streams_.wait(stream, chunks_[c].after, Edge::kFreeBeforeSmall)) return false;
  }
  return true;
}

[[gnu::always_inline]] inline void Slabs::give_back(uint64_t offset, const Moments& uses) {
  const uint64_t first = heap_.first_chunk(offset), last = heap_.last_chunk(offset);
  heap_.free(offset);
  for (uint64_t c = first; c <= last; ++c) {
    SlabChunk& entry = chunks_[c];
    entry.after.add(uses);
    if (--entry.users > 0) continue;
    --used_;
    if (entry.chunk == kNoChunk) {
      --backed_;
    } else if (!entry.listed) {
      entry.listed = true;
      idle_.push_back(c);
    }
  }
}

uint64_t Slabs::free(const void* address, const Moments& uses) {
  const uint64_t offset = offset_of(address), bytes = heap_.requested(offset);
  if (bytes == 0) return 0;
  live_bytes_ -= bytes;
  give_back(offset, uses);
  return bytes;
}

void Slabs::abandon(uint64_t offset) { give_back(offset, {}); }

void Slabs::used(const void* address, const Moments& moments) {
  const uint64_t offset = offset_of(address);
  if (heap_.requested(offset) == 0) return;
  const uint64_t last = heap_.last_chunk(offset);
  for (uint64_t c = heap_.first_chunk(offset); c <= last; ++c) chunks_[c].after.add(moments);
}

bool Slabs::reclaim_one() {
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

void Slabs::release_all() {
  for (uint64_t c = 0; c < top_; ++c) {
    SlabChunk& entry = chunks_[c];
    if (entry.chunk == kNoChunk) continue;
    if (unmap(c)) pool_.give(entry.chunk);
    else mappings_.lose(1);
    entry.chunk = kNoChunk;
  }
}

void Slabs::fill(ooc_stats& stats) const {
  stats.small_live_bytes = live_bytes_;
  stats.slab_bytes = backed_ * geometry_.chunk_bytes;
  stats.slab_used_bytes = used_ * geometry_.chunk_bytes;
}

std::string Slabs::audit() const {
  AuditCheck check;
  uint64_t backed = 0, used = 0, bytes = 0;
  for (uint64_t c = 0; c < top_; ++c) {
    backed += chunks_[c].chunk != kNoChunk ? 1 : 0;
    used += chunks_[c].users > 0 ? 1 : 0;
  }
  heap_.each_allocation([&](uint64_t, uint64_t requested) { bytes += requested; });
  check.equal("slab chunks", backed, backed_);
  check.equal("slab chunks in use", used, used_);
  check.equal("live bytes of slabs", bytes, live_bytes_);
  return check.text();
}

}  // namespace ooc
