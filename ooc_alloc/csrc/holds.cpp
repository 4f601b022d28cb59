#include "holds.h"

#include <unordered_map>

#include "audit_check.h"

namespace ooc {

void Holds::release_newest(Region* region, ThreadState* thread) {
  std::vector<Hold>& held = list_of(thread);
  if (held.empty() || held.back().get() != region) return;
  held.pop_back();
  unpin(region);
}

bool Holds::release_orphans() {
  if (orphans_.empty()) return false;
  release(orphans_);
  return true;
}

void Holds::pin_run(const Hold& hold) {
  Region* region = hold.region;
  for (uint32_t i = hold.first; i < hold.first + hold.count; ++i) {
    Slot& slot = region->slots[i];
    if (hold.kept) {
      ++slot.kept;
    } else if (slot.pins++ == 0) {
      ++region->pinned_slots;
      if (region->pins == 0) ++pinned_chunks_;
    }
  }
}

void Holds::unpin_run(const Hold& hold) {
  Region* region = hold.region;
  for (uint32_t i = hold.first; i < hold.first + hold.count; ++i) {
    Slot& slot = region->slots[i];
    if (hold.kept) {
      --slot.kept;
    } else if (--slot.pins == 0) {
      --region->pinned_slots;
      if (region->pins == 0) --pinned_chunks_;
    }
  }
}

uint64_t Holds::pin_for_user(Region* region, uint32_t access) {
  keep(region);
  if (access & OOC_WRITE) ++region->writable_pins;
  return uint64_t{region->index} << 32 | region->generation;
}

Region* Holds::of_token(RegionTable& table, uint64_t token) {
  return RegionHandle{table.numbered(token >> 32), static_cast<uint32_t>(token)}.get();
}

void Holds::unpin_for_user(Region* region, uint32_t access) {
  if (access & OOC_WRITE && region->writable_pins > 0) --region->writable_pins;
  --region->external_pins;
  unpin(region);
}

void Holds::keep(Region* region) {
  pin(region);
  ++region->external_pins;
  ++user_pins_;
}

void Holds::fill(ooc_stats& stats) const {
  stats.pinned_bytes = pinned_chunks_ * geometry_.chunk_bytes;
  stats.min_budget_bytes = least_budget_chunks_ * geometry_.chunk_bytes;
  stats.external_pin_count = user_pins_;
}

std::string Holds::audit(const Threads& threads, const RegionTable& table) const {
  AuditCheck check;
  struct Pins {
    uint64_t whole = 0;
    std::vector<uint64_t> own, kept;  // [slots] by holds of ranges
  };
  std::unordered_map<const Region*, Pins> held;
  const auto count = [&held](const std::vector<Hold>& holds) {
    for (const Hold& hold : holds) {
      const Region* region = hold.get();
      if (region == nullptr) continue;
      Pins& pins = held[region];
      pins.own.resize(region->count);
      pins.kept.resize(region->count);
      if (hold.whole()) ++pins.whole;
      for (uint32_t i = hold.first; !hold.whole() && i < hold.end(region); ++i) ++(hold.kept ? pins.kept : pins.own)[i];
    }
  };
  for (const ThreadState& thread : threads.all()) count(thread.held);
  count(orphans_);
  uint64_t pinned = 0;
  for (const Region& region : table.all()) {
    if (!region.live) continue;
    const Pins pins = held[&region];
    uint64_t own = 0;
    check.equal("pins of a region", pins.whole + region.external_pins, region.pins);
    for (uint32_t i = 0; i < region.count; ++i) {
      own += region.slots[i].pins > 0 ? 1 : 0;
      check.equal("pins of a slot", pins.own.empty() ? 0 : pins.own[i], region.slots[i].pins);
      check.equal("keeps of a slot", pins.kept.empty() ? 0 : pins.kept[i], region.slots[i].kept);
    }
    check.equal("slots with pins of their own", own, region.pinned_slots);
    pinned += region.pins > 0 ? region.count : own;
  }
  check.equal("pinned chunks", pinned, pinned_chunks_);
  return check.text();
}

}  // namespace ooc
