// Functions on host memory (ooc_core_function_begin_host): what fits no budget, and cannot be cut, runs all the same.
// Chunks of its operands that are not on the device stay where they are, and their addresses lead there: a driver can
// map physical host memory like device memory (host_copies.h, docs/decisions/0004-host-backed-memory.md).
//
// The slots are `kept` while the function holds them: nobody brings them in. Their host copy is what the function reads
// and writes, so it stays valid.
//
// All of it is done with the lock held, and where functions run on streams the host waits for all that is enqueued,
// before and after. It is the last resort, and slow.
#include <algorithm>

#include "core.h"
#include "last_error.h"

namespace ooc {

// Until nothing of the variables moves. What is under way ends without this thread. Returns false if it does not end.
bool Core::wait_until_still(Lock& lock, const std::vector<Hold>& runs) {
  const auto moves = [](const Hold& run) {
    const Region* region = run.get();
    return region != nullptr && region->moving > 0;
  };
  while (std::any_of(runs.begin(), runs.end(), moves)) {
    if (device_lost(lock)) return false;
    wait_a_while(lock);
  }
  return true;
}

// Host copies of the variables, as far as there are any, are in host memory, and stay there while `lifted` lives. Returns
// false if there is no room for them.
bool Core::lift_all(Lock& lock, const std::vector<Hold>& runs, std::vector<std::unique_ptr<HostCopies::Lifted>>& lifted) {
  for (const Hold& run : runs) {
    Region* region = run.get();
    if (region == nullptr || !host_.tiered()) continue;
    lifted.push_back(std::make_unique<HostCopies::Lifted>(region));
    while (run.get() != nullptr && (region->shift != nullptr || host_.is_below(region)))
      if (!host_.bring_up(lock, region, true)) return false;
  }
  return true;
}

int Core::map_in_place(const std::vector<Hold>& runs) {
  for (const Hold& run : runs) {
    Region* region = run.get();
    if (region == nullptr || run.resident(region)) continue;
    if (!host_.make_mappable(region))
      return fail(OOC_OUT_OF_MEMORY, "no host memory for a variable of " + std::to_string(region->bytes) +
                                         " bytes to be used there: " + host_.describe());
    const auto show_absent = [this](const Piece& part, bool has_chunk) { return has_chunk || host_.show(part); };
    if (!each_run(run.slots(region), &Slot::has_chunk, show_absent))
      return fail(OOC_DRIVER_FAILURE, "the driver did not map host memory in place of a variable; its bytes are safe: " +
                                          refused());
  }
  return OOC_OK;
}

// What is on the device is pinned there, run by run, and what is not is kept off it.
void Core::hold_in_place(ThreadState& thread, const std::vector<Hold>& runs, bool recorded) {
  for (const Hold& run : runs) {
    Region* region = run.get();
    if (region == nullptr) continue;
    region->in_ranges = true;
    region->last_function = thread.function;
    table_.touch(region);
    thread.writes |= run.writes;
    if (recorded) iterations_.recorder().mention(region, run);
    each_run(run.slots(region), &Slot::has_chunk, [&](const Piece& slots, bool has_chunk) {
      Hold part = run;
      part.kept = !has_chunk;
      part.first = slots.first;
      part.count = slots.count;
      holds_.add(part);
      thread.held.push_back(part);
      if (part.writes && has_chunk) host_.written(region, part.first, part.count);
      return true;
    });
  }
}

// An allocation of such a function that fits no budget.
void* Core::malloc_in_place(Lock& lock, uint64_t bytes) {
  ThreadState* thread = threads_.find();
  Region* region = mappings_.make(lock, static_cast<uint32_t>(geometry_.chunks_for(bytes)));
  if (region == nullptr) return nullptr;
  region->bytes = bytes;
  region->in_ranges = true;
  if (!host_.make_mappable(region) || !host_.show(Piece::whole(region))) {
    set_last_error("no host memory for a variable of " + std::to_string(bytes) +
                   " bytes in place of device memory: " + host_.describe());
    transitions_.release(region);
    return nullptr;
  }
  begin_variable(region, bytes, thread);
  Hold hold{{region, region->generation}};
  hold.count = region->count;
  hold.kept = true;
  holds_.add(hold);
  thread->held.push_back(hold);
  return geometry_.address(region);
}

}  // namespace ooc
