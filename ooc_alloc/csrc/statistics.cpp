// What ooc_core_read_stats gives: counters that are kept anyhow, put together while somebody asks. audit.cpp recounts them.
#include <algorithm>

#include "core.h"

namespace ooc {
namespace {

void fill_failures(ooc_stats& s, const Driver& driver) {
  s.driver_failures_mem_create = driver.failures(Counted::kMemCreate);
  s.driver_failures_mem_map = driver.failures(Counted::kMemMap);
  s.driver_failures_mem_set_access = driver.failures(Counted::kMemSetAccess);
  s.driver_failures_mem_unmap = driver.failures(Counted::kMemUnmap);
  s.driver_failures_copy_out = driver.failures(Counted::kCopyOut);
  s.driver_failures_copy_in = driver.failures(Counted::kCopyIn);
  s.driver_failures_host_register = driver.failures(Counted::kHostRegister);
  s.driver_failures_event_create = driver.failures(Counted::kEventCreate);
  s.driver_failures_event_record = driver.failures(Counted::kEventRecord);
  s.driver_failures_event_synchronize = driver.failures(Counted::kEventSynchronize);
  s.driver_failures_stream_synchronize = driver.failures(Counted::kStreamSynchronize);
  s.driver_failures_stream_wait_event = driver.failures(Counted::kStreamWaitEvent);
  s.driver_failure_count = driver.failures();
}

}  // namespace

// No walk: what is held and by nobody that is counted is on its way in, or is being handed over.
void Core::fill_chunks(ooc_stats& s) const {
  const uint64_t held = pool_->created() - pool_->free() - std::min(lost_chunks_, pool_->created() - pool_->free());
  const uint64_t placed = std::min(held, cached_chunks_ + resident_chunks_);
  const uint64_t backed = std::min(heap_backed_, held - placed);  // some may be counted already and not be backed yet
  s.chunks_arriving = held - placed - backed;
  s.chunks_leaving = std::min(resident_chunks_, moving_ - std::min(moving_, s.chunks_arriving));
  s.chunks_resident = placed - std::min(placed, cached_chunks_) - s.chunks_leaving;
  s.chunks_cached = std::min(placed, cached_chunks_);
  s.chunks_free = pool_->free();
  s.chunks_slab = std::min(heap_used_, backed);
  s.chunks_slab_empty = backed - s.chunks_slab;
  s.chunks_lost = lost_chunks_;
}

void Core::read_stats(ooc_stats* stats) {
  const RelaxedCaptures relaxed(order_ ? &device_ : nullptr);
  Lock lock(mutex_);
  ooc_stats& s = stats_;
  s.device_bytes = pool_->created() * chunk_bytes_;
  s.device_peak_bytes = pool_->created_peak() * chunk_bytes_;
  s.free_bytes = pool_->free() * chunk_bytes_;
  s.cached_bytes = cached_chunks_ * chunk_bytes_;
  s.slab_bytes = heap_backed_ * chunk_bytes_;
  s.slab_used_bytes = heap_used_ * chunk_bytes_;
  s.resident_bytes = resident_chunks_ * chunk_bytes_;
  s.pinned_bytes = pinned_chunks_ * chunk_bytes_;
  s.host_bytes = s.host_peak_bytes = arena_->committed() + (function_arena_ ? function_arena_->committed() : 0);
  s.host_used_bytes = host_used();
  s.driver_calls_map = device_.calls().map;
  s.driver_calls_unmap = device_.calls().unmap;
  s.driver_calls_set_access = device_.calls().set_access;
  s.event_create_count = order_ ? order_->events_created() : 0;
  s.driver_calls_create = pool_->create_calls();
  fill_failures(s, device_.driver());
  fill_chunks(s);
  s.waste_bytes = (live_region_chunks_ + heap_used_) * chunk_bytes_ - s.live_bytes;
  s.host_unpinned_bytes = arena_->unpinned();
  if (timer_) timer_->collect();
  *stats = s;
  stats->stall_seconds += device_stall_;
  stats->stall_swap_in_seconds += device_stall_;
}

}  // namespace ooc
