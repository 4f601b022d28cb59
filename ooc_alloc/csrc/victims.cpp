// Transitions that make room: which slots leave, and the wait until they have.
#include <algorithm>

#include "transitions.h"

namespace ooc {

std::vector<Piece> Transitions::choose_victims(uint64_t chunks, bool clean_only, const Scheduler* scheduler) const {
  std::vector<std::pair<uint64_t, Region*>> candidates;
  bool known = false;
  for (Region* region = with_.table.oldest(); region != nullptr; region = region->newer) {
    if (region->pins > 0 || region->resident == 0 || (region->moving > 0 && !region->in_ranges)) continue;
    const uint64_t next = scheduler != nullptr ? scheduler->next_use(region) : Scheduler::kUnknown;
    known |= next < Scheduler::kUnknown;
    candidates.emplace_back(next, region);
  }
  if (known)
    std::stable_sort(candidates.begin(), candidates.end(),
                     [](const auto& a, const auto& b) { return a.first > b.first; });
  const auto can_leave = [clean_only](const Slot& slot) {
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
      victims.push_back({region, first, end - first, true});
      chunks -= end - first;
      end = first;
    }
    if (chunks == 0) break;
  }
  return victims;
}

bool Transitions::evict(Lock& lock, const std::vector<Piece>& victims) {
  const uint64_t moved = counts_.out_bytes, dropped = counts_.drop_bytes;
  std::vector<Transfer> transfers;
  bool started = true;
  for (const Piece& piece : victims) started &= start_out(lock, piece, transfers);
  for (const Transfer& transfer : transfers) settle(lock, transfer);
  counts_.demand_out_bytes += counts_.out_bytes - moved;
  return started || counts_.out_bytes > moved || counts_.drop_bytes > dropped;
}

}  // namespace ooc
