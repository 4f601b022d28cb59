// Bringing onto the device what a function, or a user's pin, needs there; and what to say if it does not fit.
#include <algorithm>

#include "core.h"

namespace ooc {

int Core::bring_in(Lock& lock, const Hold& hold, std::vector<Transfer>& transfers, uint32_t& mapped) {
  Region* region = hold.region;
  const auto absent = [](const Slot& slot) { return slot.chunk == kNoChunk && slot.kept == 0; };
  const auto wanted = [&] {
    const auto begin = region->slots.begin();
    return static_cast<uint32_t>(std::count_if(begin + hold.first, begin + hold.end(region), absent));
  };
  std::vector<Chunk> chunks;
  const uint64_t refusals = device_.driver().refusals();
  int attempts = 0;
  do {
    wait_for_kept(lock, hold);
    if (hold.get() == nullptr || wanted() == 0) return OOC_OK;
    Room room = Room::kMade;
    if (++attempts <= kPatience) room = make_room(lock, wanted(), 0);
    else room = device_.driver().refusals() > refusals ? Room::kRefused : Room::kNone;
    if (room == Room::kRefused) return fail(OOC_DRIVER_FAILURE, describe_refusal());
    if (room == Room::kNone) return OOC_OUT_OF_MEMORY;
    if (hold.get() == nullptr) return OOC_OK;
    chunks.resize(wanted());
  } while (!take_idle(static_cast<uint32_t>(chunks.size()), chunks.data()));
  size_t used = 0;
  while (used < chunks.size() && hold.get() != nullptr) {
    const uint32_t last = hold.end(region);
    uint32_t first = hold.first;
    while (first < last && !absent(region->slots[first])) ++first;
    if (first == last) break;
    const bool blank = region->slots[first].blank;
    uint32_t end = first;
    while (end < last && end - first < chunks.size() - used && absent(region->slots[end]) &&
           region->slots[end].blank == blank)
      ++end;
    const uint64_t bytes = slot_bytes(region, first, end - first);
    const bool started = start_in(lock, {region, first, end - first, true}, chunks.data() + used, transfers);
    used += end - first;
    if (!started) {
      for (; used < chunks.size(); ++used) pool_->give(chunks[used]);
      if (device_.lost()) return fail(OOC_DRIVER_FAILURE, describe_loss());
      return fail(OOC_DRIVER_FAILURE,
                  blank ? "mapping memory for a variable failed: " + refused()
                        : "mapping memory for a swap-in failed; the variable is safe in host memory: " + refused());
    }
    if (blank) {
      mapped += end - first;
      continue;
    }
    ++stats_.demand_swap_in_count;
    stats_.demand_swap_in_bytes += bytes;
  }
  for (; used < chunks.size(); ++used) pool_->give(chunks[used]);
  return OOC_OK;
}

int Core::make_resident(Lock& lock, const std::vector<Hold>& holds) {
  const double began = now_seconds();
  const double room_before = stats_.stall_room_seconds;
  double before = began, longest = -1;  // which of them is waited for longest is looked at where somebody asks
  const Region* latest = nullptr;
  const auto waited_for = [&](const Region* region) {
    if (latest == nullptr) latest = region;
    if (!timeline_.on()) return;
    const double now = now_seconds();
    if (now - before > longest) {
      longest = now - before;
      latest = region;
    }
    before = now;
  };
  if (device_.lost()) device_lost(lock);  // it may have been found again
  if (ranges_.on()) ranges_.push("wait for variables");
  int status = OOC_OK, failures = 0;
  while (status == OOC_OK) {
    std::vector<Transfer> transfers;
    const Region* first = nullptr;
    bool complete = true;
    uint32_t mapped = 0;
    for (const Hold& hold : holds) {
      const Region* region = hold.get();
      if (region == nullptr || hold.kept || all_resident(hold, region)) continue;
      complete = false;
      if (first == nullptr) first = region;
      status = bring_in(lock, hold, transfers, mapped);
      if (status != OOC_OK) break;
    }
    for (const Transfer& transfer : transfers) {
      if (!settle(lock, transfer) && !device_.lost() && ++failures > 3)
        status = fail(OOC_DRIVER_FAILURE,
                      "copying a variable to the device failed; it is safe in host memory: " + refused());
      waited_for(transfer.region);
    }
    if (complete) break;
    if (status == OOC_OK && device_.lost() && device_lost(lock)) status = fail(OOC_DRIVER_FAILURE, describe_loss());
    if (transfers.empty() && mapped == 0 && status == OOC_OK) {
      wait_a_while(lock);  // a prefetch is on its way
      waited_for(first);
    }
  }
  const double now = now_seconds(), room = stats_.stall_room_seconds - room_before;
  if (latest == nullptr)
    for (const Hold& hold : holds) latest = hold.region;
  stalled(now, now - began - room, latest);
  if (ranges_.on()) ranges_.pop();
  if (status != OOC_OUT_OF_MEMORY) return status;
  ThreadState* thread = find_thread_state();
  if (thread != nullptr && thread->yielded) return status;
  const bool inside = thread != nullptr && thread->in_function;
  const std::string function = inside ? recorder_.function_name(thread->function) : "(a pinned variable)";
  return fail(status, describe_need(function, pinned_chunks_));
}

// The functions of several threads may not fit together. Then one that only begins lets go of its operands, waits until
// another has ended, and starts again; waiting with them could keep the other from ending.
int Core::bring_operands(Lock& lock, ThreadState& thread) {
  while (true) {
    uint64_t need = heap_used_;
    for (const Hold& hold : thread.held)
      if (const Region* region = hold.get()) need += hold.end(region) - hold.first;
    thread.may_yield = need <= pool_->limit();
    thread.yielded = false;
    const int status = make_resident(lock, thread.held);
    thread.may_yield = false;
    if (status == OOC_OK) return status;
    const std::vector<Hold> operands = thread.held;
    thread.in_function = false;
    progress_ -= kOneRuns;
    release_held(thread.held);
    changed_.notify_all();
    if (!thread.yielded) return status;
    thread.yielded = false;
    const double began = now_seconds();
    const uint32_t ended = functions_ended();
    ++yielding_;
    while (active_functions() > 0 && functions_ended() == ended) wait_a_while(lock);
    --yielding_;
    const double now = now_seconds();
    for (const Hold& operand : operands) {
      if (operand.get() == nullptr) continue;
      add_hold(operand);
      thread.held.push_back(operand);
    }
    thread.in_function = true;
    progress_ += kOneRuns;
    stalled(now, now - began, nullptr);
  }
}

std::string Core::describe_need(const std::string& function, uint64_t need_chunks) {
  const uint64_t smallest = std::max(stats_.min_budget_bytes, (need_chunks + heap_used_) * chunk_bytes_);
  if (measuring_) stats_.min_budget_bytes = smallest;  // else the function may yet run in another way
  std::string text = "function " + function + " needs " + std::to_string(need_chunks * chunk_bytes_) +
                     " bytes on the device at once, beside " + std::to_string(heap_used_ * chunk_bytes_) +
                     " bytes of small variables; the budget is " + std::to_string(pool_->limit() * chunk_bytes_) +
                     " bytes" + (pool_->lowered() ? ", which is all that the device gave. " : ". ");
  if (smallest > pool_->limit() * chunk_bytes_)
    return text + "The smallest budget that works for it is " + std::to_string(smallest) + " bytes: set OOC_BUDGET=" +
           std::to_string(smallest) + " or more, or make the function smaller (batch size).";
  const uint64_t refused = device_.driver().failures();
  return text + "Nothing could be moved out: " + arena_->describe(host_used()) + "." +
         (refused > 0 ? " The driver refused " + std::to_string(refused) + " calls." : "");
}

}  // namespace ooc
