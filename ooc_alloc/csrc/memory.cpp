// Allocating and freeing: regions with their cache, and what happens when none can be had. Slabs: slabs.cpp.
#include <algorithm>
#include <cstdlib>

#include "core.h"

namespace ooc {

void* Core::malloc(uint64_t bytes) {
  Lock lock(mutex_);
  const ThreadState* thread = order_ ? find_thread_state() : nullptr;
  const bool known = thread != nullptr && thread->stream >= StreamOrder::kFirstCompute;
  return malloc_on(lock, bytes, !order_ ? 0 : known ? thread->stream : order_->compute_stream(nullptr));
}

void* Core::malloc(uint64_t bytes, CUstream stream) {
  Lock lock(mutex_);
  return malloc_on(lock, bytes, order_ ? order_->compute_stream(stream) : 0);
}

void* Core::malloc_pinned(uint64_t bytes, CUstream stream, uint32_t access, uint64_t* token) {
  Lock lock(mutex_);
  if (token != nullptr) *token = kNoToken;
  void* address = malloc_on(lock, bytes, order_ ? order_->compute_stream(stream) : 0);
  Region* region = address != nullptr && !detached_ ? find(address) : nullptr;
  if (region == nullptr) return address;
  const uint64_t pinned = add_external_pin(region, access);
  if (token != nullptr) *token = pinned;
  // The pin as the running function's allocation is not needed beside it. Where no function ever begins it would not end.
  ThreadState* thread = find_thread_state();
  std::vector<Hold>& held = thread != nullptr ? thread->held : orphans_;
  if (!held.empty() && held.back().get() == region) {
    held.pop_back();
    drop_pin(region);
  }
  return address;
}

void* Core::malloc_on(Lock& lock, uint64_t bytes, uint32_t stream) {
  bytes = std::max<uint64_t>(bytes, 1);
  if (detached_) return malloc_failed(bytes, Room::kNone);
  if (order_ && device_.lost() && device_lost(lock)) return malloc_failed(bytes, Room::kRefused);
  if (bytes <= small_limit_) return malloc_small(lock, bytes, stream);
  return malloc_region(lock, bytes, stream);
}

void Core::count_allocation(uint64_t bytes) {
  ++stats_.allocations;
  stats_.live_bytes += bytes;
  iteration_live_peak_ = std::max(iteration_live_peak_, stats_.live_bytes);
  iteration_slab_peak_ = std::max(iteration_slab_peak_, heap_used_);
  if (stats_.live_bytes <= stats_.live_peak_bytes) return;
  stats_.live_peak_bytes = stats_.live_bytes;
  stats_.waste_at_live_peak_bytes = (live_region_chunks_ + heap_used_) * chunk_bytes_ - stats_.live_bytes;
}

Region* Core::new_region(uint32_t count) {
  const uint64_t first = space_->take(count);
  if (first == AddressSpace::kNone) {
    set_last_error("the address range for regions is used up");
    return nullptr;
  }
  Region* region;
  if (unused_regions_.empty()) {
    regions_.emplace_back();
    region = &regions_.back();
    region->index = static_cast<uint32_t>(regions_.size() - 1);
  } else {
    region = unused_regions_.back();
    unused_regions_.pop_back();
  }
  region->first = first;
  region->count = count;
  region->slots.assign(count, Slot{});
  region->resident = region->moving = region->host_valid = region->pinned_slots = 0;
  region->leaky = false;
  region->whole_iteration = 0;
  region->uses.clear();
  region->arrival.clear();
  region->parts.clear();
  region->out = {};
  std::fill_n(region_at_ + first, count, region->index + 1);
  return region;
}

bool Core::fits_addresses(uint64_t bytes) {
  if (bytes <= region_chunks_ * chunk_bytes_) return true;
  set_last_error("a variable of " + std::to_string(bytes) + " bytes is larger than the address range for variables (" +
                 std::to_string(region_chunks_ * chunk_bytes_) + " bytes)");
  return false;
}

void* Core::malloc_region(Lock& lock, uint64_t bytes, uint32_t stream) {
  if (!fits_addresses(bytes)) return nullptr;
  const auto count = static_cast<uint32_t>(chunk_of_(bytes + chunk_bytes_ - 1));
  Region* region = nullptr;
  auto same_size = cached_by_count_.find(count);
  if (same_size != cached_by_count_.end() && !same_size->second.empty()) {
    region = same_size->second.back();
    uncache(region);
    ++stats_.cache_hits;
    if (order_) {
      region->arrival = all_moments(region);
      region->uses.clear();
      region->parts.clear();
    }
  } else {
    std::vector<Chunk> chunks(count);
    if (const Room room = take_room(lock, count, chunks.data(), count); room != Room::kMade) {
      const ThreadState* thread = find_thread_state();
      const bool on_host = thread != nullptr && thread->in_function && thread->on_host;
      return on_host ? malloc_in_place(bytes) : malloc_failed(bytes, room);
    }
    region = new_region(count);
    if (region == nullptr) {
      for (Chunk chunk : chunks) pool_->give(chunk);
      return nullptr;
    }
    lock.unlock();
    const CUresult result = device_.map(address_of(region->first), chunks.data(), count, *pool_, chunk_bytes_);
    lock.lock();
    if (result != CUDA_SUCCESS) {
      for (Chunk chunk : chunks) pool_->give(chunk);
      destroy(region);
      set_last_error("mapping " + std::to_string(count) + " chunks failed: " + describe(device_.driver(), result),
                     OOC_DRIVER_FAILURE);
      return nullptr;
    }
    for (uint32_t i = 0; i < count; ++i) region->slots[i].chunk = chunks[i];
    if (order_) region->arrival = take_moments(chunks.data(), count);
    region->resident = count;
    resident_chunks_ += count;
  }
  if (order_) wait_for_memory(stream, region->arrival);
  if (order_ && device_.lost()) {
    cache(region);
    return malloc_failed(bytes, Room::kRefused);
  }
  ThreadState* thread = find_thread_state();
  region->in_ranges = false;
  begin_variable(region, bytes, thread);
  hold(region, thread);
  note_need();
  if (thread != nullptr && thread->measured_need > 0) measure_need(*thread);
  return address_of(region->first);
}

void Core::begin_variable(Region* region, uint64_t bytes, const ThreadState* thread) {
  region->live = true;
  region->bytes = bytes;
  region->place = 0;
  region->iteration = 0;
  region->variable = -1;
  used_.append(region);
  live_region_chunks_ += region->count;
  stats_.region_live_bytes += bytes;
  if (thread != nullptr && thread == sequence_thread_) recorder_.allocate(region, thread->in_function);
  count_allocation(bytes);
  if (timeline_.on()) watch_variable(OOC_EVENT_ALLOCATED, region, bytes);
}

// A function that only reads and does not fit is run to its end on host memory where kernels can use that, so that the
// error can name what it needs; its results are dropped (function_end).
void* Core::malloc_failed(uint64_t bytes, Room room) {
  if (room == Room::kRefused) {
    set_last_error(describe_refusal(), OOC_DRIVER_FAILURE);
    return nullptr;
  }
  ThreadState* thread = find_thread_state();
  const bool measuring =
      measuring_ && thread != nullptr && thread->in_function && !thread->writes && device_.host_accessible();
  const uint64_t chunks = chunk_of_(bytes + chunk_bytes_ - 1);
  if (!detached_ && !measuring) {
    const std::string function = thread != nullptr && thread->in_function
                                     ? recorder_.function_name(thread->function)
                                     : "(an allocation outside any function)";
    set_last_error(describe_need(function, pinned_chunks_ + chunks));
    return nullptr;
  }
  void* block = nullptr;
  if (posix_memalign(&block, 64, bytes) != 0) {
    set_last_error("no host memory for " + std::to_string(bytes) + " bytes");
    return nullptr;
  }
  host_blocks_[block] = bytes;
  if (!detached_) {
    thread->measured_chunks += chunks;
    measure_need(*thread);
  }
  return block;
}

void Core::measure_need(ThreadState& thread) {
  thread.measured_need = std::max(thread.measured_need, pinned_chunks_ + thread.measured_chunks);
}

void Core::free_served_by_host(void* address) {
  const auto block = host_blocks_.find(address);
  if (block == host_blocks_.end()) return;
  ThreadState* thread = find_thread_state();
  if (thread != nullptr && thread->in_function && thread->measured_need > 0)
    thread->measured_chunks -= std::min(thread->measured_chunks, chunk_of_(block->second + chunk_bytes_ - 1));
  host_blocks_.erase(block);
  ::free(address);
}

void Core::free(void* address) {
  Lock lock(mutex_);
  Moments uses;
  if (order_) {
    const ThreadState* thread = find_thread_state();
    uses = thread != nullptr && thread->in_function ? order_->now(thread->stream) : order_->now_everywhere();
  }
  free_after(address, uses);
}

void Core::free(void* address, CUstream stream) {
  Lock lock(mutex_);
  free_after(address, order_ ? order_->now(order_->compute_stream(stream)) : Moments{});
}

void Core::free_after(void* address, const Moments& uses) {
  if (!owns(address)) {
    free_served_by_host(address);
    return;
  }
  ++stats_.frees;
  if (address >= address_of(heap_first_chunk_)) {
    const auto offset = static_cast<uint64_t>(static_cast<char*>(address) - address_of(heap_first_chunk_));
    const uint64_t bytes = heap_->requested(offset);
    free_small(address, uses);
    stats_.small_live_bytes -= bytes;
    stats_.live_bytes -= bytes;
    return;
  }
  Region* region = find(address);
  if (region != nullptr && address == address_of(region->first)) free_region(region, uses);
}

void Core::free_region(Region* region, const Moments& uses) {
  if (timeline_.on()) watch_variable(OOC_EVENT_FREED, region, region->bytes);
  recorder_.free(region, sequence_runs());
  region->uses.add(uses);
  freed_since_mark_ = true;
  stats_.live_bytes -= region->bytes;
  stats_.region_live_bytes -= region->bytes;
  live_region_chunks_ -= region->count;
  pinned_chunks_ -= region->pins > 0 ? region->count : region->pinned_slots;
  region->pins = region->external_pins = region->writable_pins = region->pinned_slots = 0;
  region->live = false;
  ++region->generation;
  used_.remove(region);
  if (detached_) return;
  if (region->moving > 0) region->doomed = true;
  else dispose(region);
  if (starving_ > 0 || room_waiters_ > 0 || idle_wanted_) changed_.notify_all();
}

void Core::dispose(Region* region) {
  region->doomed = false;
  free_host_block(region);
  if (region->host_valid > 0 || region->in_ranges)
    for (Slot& slot : region->slots) {
      slot.host_valid = slot.blank = false;
      slot.pins = slot.kept = 0;
    }
  region->host_valid = 0;
  if (region->fully_resident() || !destroy(region)) cache(region);
}

void Core::cache(Region* region) {
  cached_.append(region);
  if (region->fully_resident()) cached_by_count_[region->count].push_back(region);
  cached_chunks_ += region->resident;
  resident_chunks_ -= region->resident;
}

void Core::uncache(Region* region) {
  cached_.remove(region);
  if (region->fully_resident()) {
    auto& same_size = cached_by_count_[region->count];
    if (same_size.back() == region) same_size.pop_back();
    else same_size.erase(std::find(same_size.begin(), same_size.end(), region));
  }
  cached_chunks_ -= region->resident;
  resident_chunks_ += region->resident;
}

bool Core::unmap_slots(Region* region, uint32_t first, uint32_t count) {
  if (order_) {
    const auto after = std::make_shared<const Moments>(moments_of(region, first, count));
    for (uint32_t i = first; i < first + count; ++i) {
      retire(region->slots[i].chunk, after);
      region->slots[i].chunk = kNoChunk;
    }
    region->stale.push_back({first, count, *after});
    region->resident -= count;
    resident_chunks_ -= count;
    return true;
  }
  if (device_.unmap(address_of(region->first + first), count * chunk_bytes_) != CUDA_SUCCESS) return false;
  for (uint32_t i = first; i < first + count; ++i) {
    pool_->give(region->slots[i].chunk);
    region->slots[i].chunk = kNoChunk;
  }
  region->resident -= count;
  resident_chunks_ -= count;
  return true;
}

// Resident slots that hold nothing of value and cannot be unmapped.
void Core::forget_slots(Region* region, uint32_t first, uint32_t count) {
  for (uint32_t i = first; i < first + count; ++i) region->slots[i].chunk = kNoChunk;
  region->leaky = true;
  lost_chunks_ += count;
  region->resident -= count;
  resident_chunks_ -= count;
}

bool Core::destroy(Region* region) {
  for (uint32_t i = 0; i < region->count;) {
    if (region->slots[i].chunk == kNoChunk) {
      ++i;
      continue;
    }
    uint32_t end = i;
    while (end < region->count && region->slots[end].chunk != kNoChunk) ++end;
    if (!unmap_slots(region, i, end - i)) return false;
    i = end;
  }
  std::fill_n(region_at_ + region->first, region->count, 0u);
  if (order_) bury(region);
  else if (!region->leaky) space_->give(region->first, region->count);
  unused_regions_.push_back(region);
  return true;
}

bool Core::reclaim_cached(uint64_t wanted) {
  while (pool_->available() < wanted) {
    if (Region* region = cached_.oldest()) {
      uncache(region);
      if (destroy(region)) continue;
      cache(region);
      return false;
    }
    if (idle_heap_chunks_.empty()) return false;
    const uint64_t c = idle_heap_chunks_.back();
    idle_heap_chunks_.pop_back();
    HeapChunk& entry = heap_chunks_[c];
    entry.listed = false;
    if (entry.users > 0 || entry.chunk == kNoChunk || entry.pending) continue;
    if (order_) order_->synchronize(entry.after, Edge::kUseBeforeUnmap);
    const bool used = order_ && device_.lost();
    if (!used) entry.after.clear();
    if (used || device_.unmap(address_of(heap_first_chunk_ + c), chunk_bytes_) != CUDA_SUCCESS) {
      entry.listed = true;
      idle_heap_chunks_.push_back(c);
      return false;
    }
    pool_->give(entry.chunk);
    entry.chunk = kNoChunk;
    --heap_backed_;
  }
  return true;
}

bool Core::take_idle(uint32_t count, Chunk* chunks) {
  return reclaim_cached(count) && pool_->take(count, chunks);
}

Room Core::take_room(Lock& lock, uint32_t count, Chunk* chunks, uint64_t pinned_too) {
  const uint64_t refusals = device_.driver().refusals();
  for (int attempt = 0; attempt < kPatience; ++attempt) {
    if (const Room room = make_room(lock, count, pinned_too); room != Room::kMade) return room;
    if (take_idle(count, chunks)) return Room::kMade;
  }
  return device_.driver().refusals() > refusals ? Room::kRefused : Room::kNone;
}

void Core::release_cached() {
  const RelaxedCaptures relaxed(order_ ? &device_ : nullptr);
  Lock lock(mutex_);
  if (detached_) return;
  reclaim_cached(~uint64_t{0} >> 1);
  if (order_) {
    bury_all();
    unmap_stale();
  }
  pool_->release_free();
}

}  // namespace ooc
