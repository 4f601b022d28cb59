// Small allocations: slabs of chunks that are backed when somebody needs them.
#include <algorithm>

#include "core.h"

namespace ooc {

void* Core::malloc_small(Lock& lock, uint64_t bytes, uint32_t stream) {
  const uint64_t offset = heap_->allocate(bytes);
  if (offset == SmallHeap::kFailed) return malloc_region(lock, bytes, stream);
  const uint64_t first = heap_->first_chunk(offset), last = heap_->last_chunk(offset);
  uint64_t fresh = 0;
  for (uint64_t c = first; c <= last; ++c) fresh += heap_chunks_[c].users == 0 ? 1 : 0;
  if (fresh > 0 && heap_used_ + fresh > std::max<uint64_t>(pool_->limit() / 2, 1)) {
    // Slabs never leave the device, so they get half of it. What finds no room there is a variable like any other.
    heap_->free(offset);
    return malloc_region(lock, bytes, stream);
  }
  for (uint64_t c = first; c <= last; ++c)
    if (heap_chunks_[c].users++ == 0) {
      heap_top_ = std::max(heap_top_, c + 1);
      ++heap_used_;
      if (heap_chunks_[c].chunk == kNoChunk) ++heap_backed_;  // so that it is not taken for idle before it is backed
    }
  for (uint64_t c = first; c <= last; ++c) {
    if (heap_chunks_[c].chunk != kNoChunk && !heap_chunks_[c].pending) continue;
    const Room room = back_heap_chunk(lock, c);
    if (room == Room::kMade) continue;
    free_small(address_of(heap_first_chunk_) + offset, {});
    return malloc_failed(bytes, room);
  }
  if (order_)
    for (uint64_t c = first; c <= last; ++c) {
      order_->prune(heap_chunks_[c].after);
      order_->make_wait(stream, heap_chunks_[c].after, Edge::kFreeBeforeSmall);
    }
  if (order_ && device_.lost()) {  // the stream may not wait for who had the block
    free_small(address_of(heap_first_chunk_) + offset, {});
    return malloc_failed(bytes, Room::kRefused);
  }
  stats_.small_live_bytes += bytes;
  count_allocation(bytes);
  note_need();
  return address_of(heap_first_chunk_) + offset;
}

Room Core::back_heap_chunk(Lock& lock, uint64_t c) {
  const ThreadState* thread = find_thread_state();
  const uint32_t waiting = thread != nullptr && thread->in_function ? 1 : 0;
  while (heap_chunks_[c].pending) {  // whoever backs it must not wait for the end of this thread's function
    starving_ += waiting;
    changed_.wait(lock);
    starving_ -= waiting;
  }
  if (heap_chunks_[c].chunk != kNoChunk) return Room::kMade;
  heap_chunks_[c].pending = true;
  Chunk chunk = kNoChunk;
  const Room room = take_room(lock, 1, &chunk, 0);
  CUresult result = CUDA_ERROR_OUT_OF_MEMORY;
  if (chunk != kNoChunk) {
    lock.unlock();
    result = device_.map(address_of(heap_first_chunk_ + c), &chunk, 1, *pool_, chunk_bytes_);
    lock.lock();
  }
  HeapChunk& entry = heap_chunks_[c];
  entry.pending = false;
  if (result == CUDA_SUCCESS) {
    entry.chunk = chunk;
    if (order_) entry.after.add(take_moments(&chunk, 1));
  } else if (chunk != kNoChunk) {
    pool_->give(chunk);
  }
  changed_.notify_all();
  if (result == CUDA_SUCCESS) return Room::kMade;
  return chunk != kNoChunk ? Room::kRefused : room;
}

void Core::free_small(void* address, const Moments& uses) {
  const auto offset = static_cast<uint64_t>(static_cast<char*>(address) - address_of(heap_first_chunk_));
  if (heap_->requested(offset) == 0) return;
  const uint64_t first = heap_->first_chunk(offset), last = heap_->last_chunk(offset);
  heap_->free(offset);
  for (uint64_t c = first; c <= last; ++c) {
    HeapChunk& entry = heap_chunks_[c];
    entry.after.add(uses);
    if (--entry.users > 0) continue;
    --heap_used_;
    if (entry.chunk == kNoChunk) {
      --heap_backed_;
    } else if (!entry.listed) {
      entry.listed = true;
      idle_heap_chunks_.push_back(c);
    }
  }
}

}  // namespace ooc
