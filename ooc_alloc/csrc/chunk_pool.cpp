#include "chunk_pool.h"

#include <algorithm>

namespace ooc {

ChunkPool::ChunkPool(const Driver& driver, int device, uint64_t chunk_bytes, uint64_t limit_chunks)
    : driver_(driver), chunk_bytes_(chunk_bytes), limit_(limit_chunks), configured_limit_(limit_chunks) {
  handles_.reserve(limit_chunks);  // they are read without the lock: the vector must not move, and no limit is higher
  properties_.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties_.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  properties_.location.id = device;
}

Chunk ChunkPool::create() {
  constexpr int kRetries = 3;
  CUmemGenericAllocationHandle handle = 0;
  CUresult result = CUDA_ERROR_UNKNOWN;
  for (int attempt = 0; attempt < kRetries && result != CUDA_SUCCESS; ++attempt) {
    ++create_calls_;
    result = driver_.counted(Counted::kMemCreate, driver_.cuMemCreate(&handle, chunk_bytes_, &properties_, 0));
  }
  if (result != CUDA_SUCCESS) return kNoChunk;
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

void ChunkPool::release(Chunk chunk) {
  driver_.cuMemRelease(handles_[static_cast<size_t>(chunk)]);
  unused_indexes_.push_back(chunk);
  --created_;
}

bool ChunkPool::take(uint32_t count, Chunk* out) {
  for (uint32_t i = 0; i < count; ++i) {
    if (!free_.empty()) {
      out[i] = free_.back();
      free_.pop_back();
      continue;
    }
    out[i] = created_ < limit_ ? create() : kNoChunk;
    if (out[i] == kNoChunk) {
      limit_ = std::min(limit_, created_);  // the device has less than the budget says
      while (i > 0) free_.push_back(out[--i]);
      return false;
    }
  }
  return true;
}

bool ChunkPool::recover() {
  if (!lowered()) return false;
  const Chunk chunk = create();
  if (chunk == kNoChunk) return false;
  free_.push_back(chunk);
  limit_ = configured_limit_;
  return true;
}

void ChunkPool::give(Chunk chunk) {
  if (created_ > limit_) {
    release(chunk);
  } else {
    free_.push_back(chunk);
  }
}

void ChunkPool::trim() {
  while (created_ > limit_ && !free_.empty()) {
    release(free_.back());
    free_.pop_back();
  }
}

void ChunkPool::release_free() {
  for (Chunk chunk : free_) release(chunk);
  free_.clear();
  limit_ = configured_limit_;
}

}  // namespace ooc
