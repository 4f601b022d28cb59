// A budget that changes while the program runs, and the wait for everything that is under way.
#include <algorithm>

#include "core.h"
#include "last_error.h"

namespace ooc {

// Gives chunks beyond the limit back to the driver: free ones, cached ones, those under empty slabs; then moves
// variables out. Returns false if those that are left are in use.
bool Core::shrink_to_limit(Lock& lock) {
  int fruitless = 0;
  bool clean_only = false;
  while (pool_.created() > pool_.limit() && fruitless < kPatience) {
    pool_.trim();
    const uint64_t before = pool_.created();
    if (before <= pool_.limit()) break;
    idle_.reclaim(1);
    if (pool_.created() < before) continue;
    const std::vector<Piece> victims = transitions_.choose_victims(before - pool_.limit(), clean_only, scheduler_);
    if (!victims.empty() && transitions_.evict(lock, victims) && pool_.created() < before) continue;
    const bool nothing_moves = transitions_.moving() == 0 && threads_.active() == 0;
    if (victims.empty() && !clean_only && nothing_moves && !release_idle_threads()) break;
    ++fruitless;
    clean_only = !clean_only;
    if (device_lost(lock)) break;
    if (transitions_.moving() > 0 || threads_.active() > 0) wait_a_while(lock);
  }
  return pool_.created() <= pool_.limit();
}

int Core::set_budget(uint64_t bytes) {
  const RelaxedCaptures relaxed(streams_.capturable());
  ThreadState& thread = thread_state();
  Lock lock(mutex_);
  const uint64_t chunk = geometry_.chunk_bytes;
  const uint64_t chunks = bytes / chunk, first = geometry_.budget_bytes / chunk, before = pool_.configured_limit();
  if (detached_) return fail(OOC_INVALID, "the device is not used any more: there is no budget to change");
  if (thread.in_function) return fail(OOC_INVALID, "the budget cannot change within a function");
  if (chunks == 0)
    return fail(OOC_INVALID, "a budget of " + std::to_string(bytes) + " bytes holds no chunk of " +
                                 std::to_string(chunk) + " bytes");
  if (chunks > first)
    return fail(OOC_INVALID, "the budget cannot become " + std::to_string(bytes) + " bytes: it began as " +
                                 std::to_string(first * chunk) + " bytes and can only be lowered; set OOC_BUDGET");
  holds_.release(thread.held);
  pool_.set_limit(chunks);
  if (!shrink_to_limit(lock)) {
    const uint64_t pinned = holds_.pinned_chunks() * chunk, small = slabs_.used() * chunk;
    pool_.set_limit(before);
    if (device_.lost()) return fail(OOC_DRIVER_FAILURE, device_.describe_loss());
    return fail(OOC_OUT_OF_MEMORY,
                "the budget cannot be lowered to " + std::to_string(bytes) + " bytes: " + std::to_string(pinned) +
                    " bytes are in use by functions or pinned, " + std::to_string(small) +
                    " bytes hold small variables, and host memory for swapped data is limited to " +
                    std::to_string(host_.budget()) + " bytes; free some first, or ask for " +
                    std::to_string(pinned + small) + " bytes or more");
  }
  // A chunk that is still mapped somewhere would not go back to the driver.
  mappings_.bury_all();
  mappings_.vacate_all();
  budget_bytes_ = bytes;
  changed_.notify_all();
  return OOC_OK;
}

int Core::synchronize() {
  const RelaxedCaptures relaxed(streams_.capturable());
  Lock lock(mutex_);
  if (detached_) return OOC_OK;
  (void)streams_.host_waits_for_all();  // where the device is lost, it may be found again
  if (device_lost(lock)) return fail(OOC_DRIVER_FAILURE, device_.describe_loss());
  lock.unlock();
  for (const Direction direction : {Direction::kOut, Direction::kIn})
    if (const CUresult result = device_.wait(nullptr, direction); result != CUDA_SUCCESS)
      return fail(OOC_DRIVER_FAILURE, "waiting for the device failed: " + describe(device_.driver(), result));
  return OOC_OK;
}

}  // namespace ooc
