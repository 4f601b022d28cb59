// Bringing onto the device what a function, or a user's pin, needs there.
#include <algorithm>

#include "clock.h"
#include "core.h"
#include "last_error.h"

namespace ooc {

void Core::stalled(double now, double seconds, const Region* waited_for) {
  const ThreadState* thread = threads_.find();
  watch_.stall(now - seconds, now, waited_for, thread);
  using WaitsFor = Iterations::WaitsFor;
  iterations_.stalled(seconds, waited_for != nullptr ? WaitsFor::kVariable : WaitsFor::kRoom, thread);
}

// A function of another thread uses some of it in host memory. Its pins may have outlasted it.
void Core::wait_for_kept(Lock& lock, const Hold& hold) {
  const ThreadState* thread = threads_.find();
  for (Region* region = hold.get(); region != nullptr && region->in_ranges; region = hold.get()) {
    if (std::ranges::none_of(hold.slots(region).slots(), [](const Slot& slot) { return slot.kept > 0; })) return;
    if (release_idle_threads()) continue;
    const Starving starving(threads_, thread != nullptr && thread->in_function);
    wait_a_while(lock);
  }
}

// Starts bringing in what is absent of a run. `mapped` counts the slots that came without a copy.
int Core::bring_in(Lock& lock, const Hold& hold, std::vector<Transfer>& transfers, uint32_t& mapped) {
  Region* region = hold.region;
  const auto wanted = [&] {
    return static_cast<uint32_t>(std::ranges::count_if(hold.slots(region).slots(), &Slot::may_come));
  };
  std::vector<Chunk> chunks;
  const uint64_t refusals = refusal_count();
  const HostCopies::Lifted lifted(region);
  int attempts = 0;
  do {
    wait_for_kept(lock, hold);
    if (hold.get() == nullptr || wanted() == 0) return OOC_OK;
    // The operands before hold host memory until they have arrived.
    if (host_.tiered() && !transfers.empty() && (host_.is_below(region) || idle_.count() < wanted())) return OOC_OK;
    if (host_.is_below(region)) {
      const double began = now_seconds();
      const bool up = host_.bring_up(lock, region, true);
      disk_stall_seconds_ += now_seconds() - began;
      if (!up && device_.lost()) return fail(OOC_DRIVER_FAILURE, device_.describe_loss());
      if (!up && refusal_count() > refusals) return fail(OOC_DRIVER_FAILURE, describe_failed_copy(region));
      if (!up) return fail(OOC_DRIVER_FAILURE, "no host memory for a variable of " + std::to_string(region->bytes) +
                                                   " bytes that is on the disk: " + host_.describe());
      continue;
    }
    Room room = Room::kMade;
    if (++attempts <= kPatience) room = make_room(lock, wanted(), 0);
    else room = refusal_count() > refusals ? Room::kRefused : Room::kNone;
    if (room == Room::kRefused) return fail(OOC_DRIVER_FAILURE, describe_refusal());
    if (room == Room::kNone) return OOC_OUT_OF_MEMORY;
    if (hold.get() == nullptr) return OOC_OK;
    chunks.resize(wanted());
  } while (chunks.empty() || host_.is_below(region) || !idle_.take(static_cast<uint32_t>(chunks.size()), chunks.data()));
  size_t used = 0;
  bool started = true, blank = false;
  while (started && used < chunks.size() && hold.get() != nullptr) {
    Piece piece = Transitions::next_absent(region, hold.first, hold.end(region), chunks.size() - used);
    if (piece.count == 0) break;
    piece.on_demand = true;
    blank = region->slots[piece.first].blank();
    started = transitions_.start_in(lock, piece, chunks.data() + used, transfers);
    used += piece.count;
    if (started && blank) mapped += piece.count;
  }
  for (; used < chunks.size(); ++used) mappings_.give(chunks[used], nullptr);
  if (started) return OOC_OK;
  if (device_.lost()) return fail(OOC_DRIVER_FAILURE, device_.describe_loss());
  const char* what = blank ? "mapping memory for a variable failed: "
                           : "mapping memory for a swap-in failed; the variable is safe in host memory: ";
  return fail(OOC_DRIVER_FAILURE, what + refused());
}

int Core::make_resident(Lock& lock, const std::vector<Hold>& holds) {
  const double began = now_seconds();
  const double room_before = iterations_.stall_room_seconds();
  double before = began, longest = -1;  // which of them is waited for longest is looked at where somebody asks
  const Region* latest = nullptr;
  const auto waited_for = [&](const Region* region) {
    if (latest == nullptr) latest = region;
    if (!watch_.recording()) return;
    const double now = now_seconds();
    if (now - before > longest) {
      longest = now - before;
      latest = region;
    }
    before = now;
  };
  device_lost(lock);  // the device may have been found again
  int status = OOC_OK, failures = 0;
  {
    const ShownRange shown(watch_, "wait for variables");
    while (status == OOC_OK) {
      std::vector<Transfer> transfers;
      const Region* first = nullptr;
      bool complete = true;
      uint32_t mapped = 0;
      for (const Hold& hold : holds) {
        const Region* region = hold.get();
        if (region == nullptr || hold.kept || hold.resident(region)) continue;
        complete = false;
        if (first == nullptr) first = region;
        status = bring_in(lock, hold, transfers, mapped);
        if (status != OOC_OK) break;
      }
      for (const Transfer& transfer : transfers) {
        if (!transitions_.settle(lock, transfer) && !device_.lost() && ++failures > 3)
          status = fail(OOC_DRIVER_FAILURE, describe_failed_copy(transfer.region));
        waited_for(transfer.region);
      }
      if (complete) break;
      if (status == OOC_OK && device_lost(lock)) status = fail(OOC_DRIVER_FAILURE, device_.describe_loss());
      if (transfers.empty() && mapped == 0 && status == OOC_OK) {
        wait_a_while(lock);  // a prefetch is on its way
        waited_for(first);
      }
    }
    const double now = now_seconds(), room = iterations_.stall_room_seconds() - room_before;
    if (latest == nullptr)
      for (const Hold& hold : holds) latest = hold.region;
    stalled(now, now - began - room, latest);
  }
  if (status != OOC_OUT_OF_MEMORY) return status;
  const ThreadState* thread = threads_.find();
  if (thread != nullptr && thread->yielded) return status;
  const bool inside = thread != nullptr && thread->in_function;
  const std::string function = inside ? recorder().function_name(thread->function) : "(a pinned variable)";
  return fail(status, describe_need(function, holds_.pinned_chunks()));
}

// The functions of several threads may not fit together. Then one that only begins lets go of its operands, waits until
// another has ended, and starts again; waiting with them could keep the other from ending.
int Core::bring_operands(Lock& lock, ThreadState& thread) {
  const double until = now_seconds() + patience_for_work();
  while (true) {
    uint64_t need = slabs_.used();
    for (const Hold& hold : thread.held)
      if (const Region* region = hold.get()) need += hold.end(region) - hold.first;
    thread.may_yield = need <= pool_.limit() && (threads_.works() == 0 || now_seconds() < until);
    thread.yielded = false;
    const int status = make_resident(lock, thread.held);
    thread.may_yield = false;
    if (status == OOC_OK) return status;
    const std::vector<Hold> operands = thread.held;
    thread.in_function = false;
    threads_.takes_back();
    holds_.release(thread.held);
    changed_.notify_all();
    if (!thread.yielded) return status;
    thread.yielded = false;
    const double began = now_seconds();
    const uint32_t ended = threads_.ended();
    ++threads_.yielding;
    const auto others = [&] { return threads_.active() > 0 || (threads_.work_may_end(true) && now_seconds() < until); };
    while (others() && threads_.ended() == ended) wait_a_while(lock);
    --threads_.yielding;
    const double now = now_seconds();
    for (const Hold& operand : operands) {
      if (operand.get() == nullptr) continue;
      holds_.add(operand);
      thread.held.push_back(operand);
    }
    thread.in_function = true;
    threads_.begins();
    stalled(now, now - began, nullptr);
  }
}

}  // namespace ooc
