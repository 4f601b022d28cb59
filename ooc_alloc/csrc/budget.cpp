// A budget that changes while the program runs, and the wait for everything that is under way.
#include <algorithm>

#include "core.h"

namespace ooc {

// What live regions have left behind when they were moved out is unmapped now: a chunk that is still mapped somewhere
// would not go back to the driver.
void Core::unmap_stale() {
  for (Region& region : regions_) {
    if (region.moving > 0) continue;  // the owner of the transition may be at it
    for (const Region::Stale& stale : region.stale) {
      order_->synchronize(stale.after, Edge::kUseBeforeUnmap);
      if (device_.lost()) return;
      if (device_.unmap(address_of(region.first + stale.first), stale.count * chunk_bytes_) != CUDA_SUCCESS)
        region.leaky = true;
    }
    region.stale.clear();
  }
}

// Gives chunks beyond the limit back to the driver: free ones, cached ones, those under empty slabs; then moves
// variables out. False: those that are left are in use.
bool Core::shrink_to_limit(Lock& lock) {
  int fruitless = 0;
  bool clean_only = false;
  while (pool_->created() > pool_->limit() && fruitless < kPatience) {
    pool_->trim();
    const uint64_t before = pool_->created();
    if (before <= pool_->limit()) break;
    reclaim_cached(1);
    if (pool_->created() < before) continue;
    const std::vector<Piece> victims = choose_victims(before - pool_->limit(), clean_only);
    if (!victims.empty() && evict(lock, victims) && pool_->created() < before) continue;
    if (victims.empty() && !clean_only && moving_ == 0 && active_functions() == 0 && !release_idle_threads()) break;
    ++fruitless;
    clean_only = !clean_only;
    if (device_.lost() && device_lost(lock)) break;
    if (moving_ > 0 || active_functions() > 0) wait_a_while(lock);
  }
  return pool_->created() <= pool_->limit();
}

int Core::set_budget(uint64_t bytes) {
  const RelaxedCaptures relaxed(order_ ? &device_ : nullptr);
  ThreadState& thread = thread_state();
  Lock lock(mutex_);
  const uint64_t chunks = bytes / chunk_bytes_, before = pool_->configured_limit();
  if (detached_) return fail(OOC_INVALID, "the device is not used any more: there is no budget to change");
  if (thread.in_function) return fail(OOC_INVALID, "the budget cannot change within a function");
  if (chunks == 0)
    return fail(OOC_INVALID, "a budget of " + std::to_string(bytes) + " bytes holds no chunk of " +
                                 std::to_string(chunk_bytes_) + " bytes");
  if (chunks > first_budget_chunks_)
    return fail(OOC_INVALID, "the budget cannot become " + std::to_string(bytes) + " bytes: it began as " +
                                 std::to_string(first_budget_chunks_ * chunk_bytes_) + " bytes and can only be lowered; set OOC_BUDGET");
  release_held(thread.held);
  pool_->set_limit(chunks);
  if (!shrink_to_limit(lock)) {
    if (device_.lost()) {
      pool_->set_limit(before);
      return fail(OOC_DRIVER_FAILURE, describe_loss());
    }
    const uint64_t least = (pinned_chunks_ + heap_used_) * chunk_bytes_;
    pool_->set_limit(before);
    return fail(OOC_OUT_OF_MEMORY,
                "the budget cannot be lowered to " + std::to_string(bytes) + " bytes: " +
                    std::to_string(pinned_chunks_ * chunk_bytes_) + " bytes are in use by functions or pinned, " +
                    std::to_string(heap_used_ * chunk_bytes_) + " bytes hold small variables, and host memory for swapped data is limited to " +
                    std::to_string(arena_->budget()) + " bytes; free some first, or ask for " + std::to_string(least) + " bytes or more");
  }
  if (order_) {
    bury_all();
    unmap_stale();
  }
  stats_.budget_bytes = bytes;
  changed_.notify_all();
  return OOC_OK;
}

int Core::synchronize() {
  const RelaxedCaptures relaxed(order_ ? &device_ : nullptr);
  Lock lock(mutex_);
  if (detached_) return OOC_OK;
  if (order_) order_->synchronize_all();
  if (device_.lost() && device_lost(lock)) return fail(OOC_DRIVER_FAILURE, describe_loss());
  lock.unlock();
  for (const Direction direction : {Direction::kOut, Direction::kIn})
    if (const CUresult result = device_.wait(nullptr, direction); result != CUDA_SUCCESS)
      return fail(OOC_DRIVER_FAILURE, "waiting for the device failed: " + describe(device_.driver(), result));
  return OOC_OK;
}

}  // namespace ooc
