// Room on demand, and what is said where there is none to be had.
#include <algorithm>

#include "clock.h"
#include "core.h"
#include "last_error.h"

namespace ooc {

double Core::patience_for_work() const { return std::min(kPatienceForWork, device_.wait_limit()); }

bool Core::release_idle_threads() {
  bool any = false;
  for (ThreadState& thread : threads_.all()) {
    if (thread.in_function || thread.held.empty() || &thread == threads_.find()) continue;
    holds_.release(thread.held);
    any = true;
  }
  return any || (threads_.active() == 0 && threads_.works() == 0 && holds_.release_orphans());
}

Core::Room Core::make_room(Lock& lock, uint64_t chunks, uint64_t pinned_too) {
  if (idle_.count() >= chunks) return Room::kMade;
  ThreadState* thread = threads_.find();
  const bool counted = thread != nullptr && thread->in_function;
  const double began = now_seconds(), until = began + patience_for_work();
  const ShownRange shown(watch_, "wait for room");
  ++room_waiters_;
  int fruitless = 0;
  bool clean_only = false;  // every other time after a failure: dirty variables may have nowhere to go
  uint64_t refusals = refusal_count();  // when something last got out of the way
  double stuck_since = 0;
  // Nobody's function will end. But a thread outside of functions may be about to free what one of them waits for.
  const auto gives_up = [&] {
    if (release_idle_threads() || pool_.recover()) return false;
    if (threads_.active() <= (counted ? 1u : 0u)) return true;
    if (stuck_since == 0) stuck_since = now_seconds();
    wait_a_while(lock);
    return now_seconds() - stuck_since > kPatienceWhileStuck;
  };
  while (idle_.count() < chunks && fruitless < kPatience && !device_lost(lock)) {
    const bool work_ends = threads_.work_may_end(counted) && now_seconds() < until;
    const bool others_run = threads_.active() - (counted ? 1u : 0u) > threads_.starving || work_ends;
    const bool hopeless = holds_.pinned_chunks() + slabs_.used() + pinned_too > pool_.limit();
    if (hopeless && counted && (threads_.active() > 1 || work_ends) && thread->may_yield) {
      thread->yielded = true;
      break;
    }
    if (hopeless && !others_run) {
      if (gives_up()) break;
      continue;
    }
    if (!hopeless && scheduler_ != nullptr && scheduler_->relief_coming()) {
      wait_a_while(lock);
      continue;
    }
    const std::vector<Piece> victims = transitions_.choose_victims(chunks - idle_.count(), clean_only, scheduler_);
    if (!hopeless && (!victims.empty() || clean_only)) {
      const uint64_t before = idle_.count();
      if (transitions_.evict(lock, victims) && idle_.count() > before) {
        refusals = refusal_count();
        continue;
      }
      if (pool_.recover()) continue;
      ++fruitless;
      clean_only = !clean_only;
      if (transitions_.moving() > 0 || others_run) wait_a_while(lock);
      continue;
    }
    if (transitions_.moving() > 0) {
      wait_a_while(lock);
      continue;
    }
    if (others_run) {
      stuck_since = 0;
      const Starving starving(threads_, counted);
      wait_a_while(lock);
      continue;
    }
    if (gives_up()) break;
  }
  if (--room_waiters_ == 0 && idle_wanted_) changed_.notify_all();
  const double now = now_seconds();
  stalled(now, now - began, nullptr);
  if (idle_.count() >= chunks) return Room::kMade;
  return device_.lost() || refusal_count() > refusals ? Room::kRefused : Room::kNone;
}

Core::Room Core::take_room(Lock& lock, uint32_t count, Chunk* chunks, uint64_t pinned_too) {
  const uint64_t refusals = refusal_count();
  for (int attempt = 0; attempt < kPatience; ++attempt) {
    if (const Room room = make_room(lock, count, pinned_too); room != Room::kMade) return room;
    if (idle_.take(count, chunks)) return Room::kMade;
  }
  return refusal_count() > refusals ? Room::kRefused : Room::kNone;
}

int Core::evict_unpinned(Lock& lock) {
  std::vector<Piece> all;
  for (Region* region = table_.oldest(); region != nullptr; region = region->newer)
    if (region->pins == 0 && region->resident > 0) all.push_back({region, 0, region->count, true});
  transitions_.evict(lock, all);
  const std::string failure = transitions_.take_strict_failure();
  return failure.empty() ? OOC_OK : fail(OOC_STRICT_VIOLATION, failure);
}

int Core::evict_all() {
  const RelaxedCaptures relaxed(streams_.capturable());
  Lock lock(mutex_);
  return detached_ ? OOC_OK : evict_unpinned(lock);
}

// ---- a budget that changes, and the wait for everything that is under way -------------------------------------------

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
  const uint64_t chunk = geometry_.chunk_bytes;
  const uint64_t chunks = bytes / chunk, first = geometry_.budget_bytes / chunk;
  Lock lock(mutex_);
  if (!detached_ && !thread.in_function && chunks > 0 && chunks < pool_.configured_limit()) {
    lock.unlock();
    if (const int status = tell_budget_falls()) return status;
    lock.lock();
  }
  const uint64_t before = pool_.configured_limit();
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

// ---- words ----------------------------------------------------------------------------------------------------------

std::string Core::describe_refusal() const {
  if (device_.lost()) return device_.describe_loss();
  return "no room could be made on the device: " + refused() +
         (host_.refused_by_system() ? "; " + host_.describe() : "") +
         ". Every variable is safe in one of the two memories. If this was passing, what failed can be run again; if the "
         "driver goes on refusing, save what is needed and restart the process";
}

std::string Core::refused() const {
  if (host_.refusals() == 0) return device_.refused();
  return (device_.driver().refusals() > 0 ? device_.refused() + "; " : "") + host_.file()->last_failure();
}

// Of what should have come to the device.
std::string Core::describe_failed_copy(const Region* region) {
  if (host_.refusals() == 0)
    return "copying a variable to the device failed; it is safe in host memory: " + device_.refused();
  const std::string place = region->place != 0 ? std::string(" allocated at ") + watch_.places().text(region->place) : "";
  return "a variable of " + std::to_string(region->bytes) + " bytes" + place + ", which function " +
         recorder().function_name(region->last_function) + " needs, could not be read: " + host_.file()->last_failure() +
         ". Its bytes may be lost; every other variable is where it was. Save what is needed";
}

std::string Core::describe_need(const std::string& function, uint64_t need_chunks) {
  const uint64_t chunk = geometry_.chunk_bytes, limit = pool_.limit() * chunk;
  const uint64_t smallest_chunks = std::max(holds_.least_budget_chunks(), need_chunks + slabs_.used());
  if (stand_ins_.on()) holds_.note_budget(smallest_chunks);  // else the function may yet run in another way
  const uint64_t smallest = smallest_chunks * chunk;
  std::string text = "function " + function + " needs " + std::to_string(need_chunks * chunk) +
                     " bytes on the device at once, beside " + std::to_string(slabs_.used() * chunk) +
                     " bytes of small variables; the budget is " + std::to_string(limit) + " bytes" +
                     (pool_.lowered() ? ", which is all that the device gave. " : ". ");
  if (smallest > limit)
    return text + "The smallest budget that works for it is " + std::to_string(smallest) + " bytes: set OOC_BUDGET=" +
           std::to_string(smallest) + " or more, or make the function smaller (batch size).";
  const uint64_t refused = device_.driver().failures();
  return text + "Nothing could be moved out: " + host_.describe() + "." +
         (refused > 0 ? " The driver refused " + std::to_string(refused) + " calls." : "");
}

}  // namespace ooc
