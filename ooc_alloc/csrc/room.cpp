// Room on demand: the choice of victims, and what is said where there is none to be had.
#include <algorithm>

#include "core.h"

namespace ooc {

// Furthest next use first where the sequence is known, oldest use first where it is not; the end of a region before its
// beginning; no more than is needed.
std::vector<Piece> Core::choose_victims(uint64_t chunks, bool clean_only) {
  std::vector<std::pair<uint64_t, Region*>> candidates;
  bool known = false;
  for (Region* region = used_.oldest(); region != nullptr; region = region->newer) {
    if (region->pins > 0 || region->resident == 0 || (region->moving > 0 && !region->in_ranges)) continue;
    const uint64_t next = scheduler_ != nullptr ? scheduler_->next_use(region) : Scheduler::kUnknown;
    known |= next < Scheduler::kUnknown;
    candidates.emplace_back(next, region);
  }
  if (known)
    std::stable_sort(candidates.begin(), candidates.end(),
                     [](const auto& a, const auto& b) { return a.first > b.first; });
  auto can_leave = [clean_only](const Slot& slot) {
    return slot.at_rest() && slot.pins == 0 && (slot.host_valid || !clean_only);
  };
  std::vector<Piece> victims;
  for (const auto& [next, region] : candidates) {
    for (uint32_t end = region->count; end > 0 && chunks > 0;) {
      if (!can_leave(region->slots[end - 1])) {
        --end;
        continue;
      }
      uint32_t first = end;
      while (first > 0 && end - first < chunks && can_leave(region->slots[first - 1])) --first;
      victims.push_back({region, first, end - first});
      chunks -= end - first;
      end = first;
    }
    if (chunks == 0) break;
  }
  return victims;
}

bool Core::evict(Lock& lock, const std::vector<Piece>& victims) {
  const uint64_t moved = stats_.swap_out_bytes, dropped = stats_.clean_drop_bytes;
  std::vector<Transfer> transfers;
  bool started = true;
  for (Piece piece : victims) {
    piece.on_demand = true;
    started &= start_out(lock, piece, transfers);
  }
  for (const Transfer& transfer : transfers) settle(lock, transfer);
  stats_.demand_swap_out_bytes += stats_.swap_out_bytes - moved;
  return started || stats_.swap_out_bytes > moved || stats_.clean_drop_bytes > dropped;
}

bool Core::release_idle_threads() {
  bool any = false;
  for (ThreadState& thread : thread_states_) {
    if (thread.in_function || thread.held.empty() || &thread == find_thread_state()) continue;
    release_held(thread.held);
    any = true;
  }
  if (!any && !orphans_.empty() && active_functions() == 0) {
    release_held(orphans_);
    any = true;
  }
  return any;
}

Room Core::make_room(Lock& lock, uint64_t chunks, uint64_t pinned_too) {
  if (idle_chunks() >= chunks) return Room::kMade;
  ThreadState* thread = find_thread_state();
  const bool counted = thread != nullptr && thread->in_function;
  const double began = now_seconds();
  if (ranges_.on()) ranges_.push("wait for room");
  ++room_waiters_;
  int fruitless = 0;
  bool clean_only = false;  // every other time after a failure: dirty variables may have nowhere to go
  uint64_t refusals = device_.driver().refusals();  // when something last got out of the way
  while (idle_chunks() < chunks && fruitless < kPatience && !(device_.lost() && device_lost(lock))) {
    const bool others_run = active_functions() - (counted ? 1u : 0u) > starving_;
    const bool hopeless = pinned_chunks_ + heap_used_ + pinned_too > pool_->limit();
    if (hopeless && counted && active_functions() > 1 && thread->may_yield) {
      thread->yielded = true;
      break;
    }
    if (hopeless && !others_run) {
      if (release_idle_threads() || pool_->recover()) continue;
      break;
    }
    if (!hopeless && scheduler_ != nullptr && scheduler_->relief_coming()) {
      wait_a_while(lock);
      continue;
    }
    const std::vector<Piece> victims = choose_victims(chunks - idle_chunks(), clean_only);
    if (!hopeless && (!victims.empty() || clean_only)) {
      const uint64_t before = idle_chunks();
      if (evict(lock, victims) && idle_chunks() > before) {
        refusals = device_.driver().refusals();
        continue;
      }
      ++fruitless;
      clean_only = !clean_only;
      if (moving_ > 0 || others_run) wait_a_while(lock);
      continue;
    }
    if (moving_ > 0) {
      wait_a_while(lock);
      continue;
    }
    if (others_run) {
      if (counted) ++starving_;
      wait_a_while(lock);
      if (counted) --starving_;
      continue;
    }
    if (!release_idle_threads()) break;
  }
  if (--room_waiters_ == 0 && idle_wanted_) changed_.notify_all();
  const double now = now_seconds();
  stalled(now, now - began, nullptr);
  if (ranges_.on()) ranges_.pop();
  if (idle_chunks() >= chunks) return Room::kMade;
  return device_.lost() || device_.driver().refusals() > refusals ? Room::kRefused : Room::kNone;
}

std::string Core::describe_refusal() const {
  if (device_.lost()) return describe_loss();
  const bool no_memory = arena_->refusal() == Refusal::kSystem;
  return "no room could be made on the device: " + refused() + (no_memory ? "; " + arena_->describe(host_used()) : "") +
         ". Every variable is safe in one of the two memories. If this was passing, what failed can be run again; if the "
         "driver goes on refusing, save what is needed and restart the process";
}

int Core::evict_unpinned(Lock& lock) {
  std::vector<Piece> all;
  for (Region* region = used_.oldest(); region != nullptr; region = region->newer)
    if (region->pins == 0 && region->resident > 0) all.push_back({region, 0, region->count});
  evict(lock, all);
  if (strict_failure_.empty()) return OOC_OK;
  const std::string failure = std::move(strict_failure_);
  strict_failure_.clear();
  return fail(OOC_STRICT_VIOLATION, failure);
}

uint32_t Core::residency(const void* address, uint8_t* chunks, uint32_t count) {
  Lock lock(mutex_);
  const Region* region = find(address);
  if (region == nullptr) return 0;
  for (uint32_t i = 0; i < std::min(count, region->count); ++i) {
    const Slot& slot = region->slots[i];
    chunks[i] = slot.chunk != kNoChunk && !slot.arriving && !slot.leaving ? 1 : 0;
  }
  return region->count;
}

int Core::evict_all() {
  const RelaxedCaptures relaxed(order_ ? &device_ : nullptr);
  Lock lock(mutex_);
  return detached_ ? OOC_OK : evict_unpinned(lock);
}

}  // namespace ooc
