#include "mappings.h"

#include "audit_check.h"

namespace ooc {

bool Mappings::vacate(Lock& lock, const Piece& slots) {
  auto& stale = slots.region->order.stale;
  for (size_t i = 0; i < stale.size();) {
    if (stale[i].first >= slots.end() || slots.first >= stale[i].first + stale[i].count) {
      ++i;
      continue;
    }
    const RegionOrder::Stale old = stale[i];
    if (!streams_.host_waits(old.after, Edge::kUseBeforeUnmap)) return false;
    stale.erase(stale.begin() + static_cast<std::ptrdiff_t>(i));
    lock.unlock();
    undo(slots.region->first + old.first, old.count);
    lock.lock();
    i = 0;  // others may have changed the list meanwhile
  }
  return true;
}

bool Mappings::vacate_all() {
  for (Region& region : table_.all()) {
    if (region.moving > 0) continue;  // the owner of the transition may be at it
    for (auto& stale = region.order.stale; !stale.empty(); stale.pop_back()) {
      if (!streams_.host_waits(stale.back().after, Edge::kUseBeforeUnmap)) return false;
      if (!undo(region.first + stale.back().first, stale.back().count)) region.leaky = true;
    }
  }
  return true;
}

bool Mappings::unmap(const Piece& slots) {
  Region* region = slots.region;
  std::shared_ptr<const Moments> after;
  if (streams_.on()) {
    after = std::make_shared<const Moments>(Streams::users(region, slots.first, slots.count));
    region->order.stale.push_back({slots.first, slots.count, *after});
  } else if (!undo(region->first + slots.first, slots.count)) {
    return false;
  }
  for (uint32_t i = slots.first; i < slots.end(); ++i) give(region->slots[i].take(), after);
  table_.lost(region, slots.count);
  return true;
}

void Mappings::forget(const Piece& slots) {
  for (uint32_t i = slots.first; i < slots.end(); ++i) slots.region->slots[i].take();
  slots.region->leaky = true;
  lost_chunks_ += slots.count;
  table_.lost(slots.region, slots.count);
}

bool Mappings::destroy(Region* region) {
  for (uint32_t i = 0; i < region->count;) {
    if (!region->slots[i].has_chunk()) {
      ++i;
      continue;
    }
    uint32_t end = i;
    while (end < region->count && region->slots[end].has_chunk()) ++end;
    if (!unmap({region, i, end - i})) return false;
    i = end;
  }
  table_.remove(region);
  if (streams_.on()) bury(region);
  else if (!region->leaky) table_.give_addresses(region->first, region->count);
  return true;
}

void Mappings::give(Chunk chunk, const std::shared_ptr<const Moments>& after) {
  if (after) {
    const auto index = static_cast<size_t>(chunk);
    if (users_.size() <= index) users_.resize(index + 1);
    users_[index] = after;
  }
  pool_.give(chunk);
}

Moments Mappings::take_users(const Chunk* chunks, uint32_t count) {
  Moments all;
  for (uint32_t i = 0; i < count; ++i) {
    const auto index = static_cast<size_t>(chunks[i]);
    if (index >= users_.size() || !users_[index]) continue;
    all.add(*users_[index]);
    users_[index].reset();
  }
  streams_.prune(all);
  return all;
}

// The region's slots have lost their chunks; the addresses are unmapped later.
void Mappings::bury(Region* region) {
  Grave grave{region->first, region->count, region->leaky, {}, {}};
  for (const RegionOrder::Stale& stale : region->order.stale) {
    grave.mapped.emplace_back(stale.first, stale.count);
    grave.after.add(stale.after);
  }
  region->order.stale.clear();
  graves_.push_back(std::move(grave));
  constexpr size_t kMostGraves = 4096;  // when the daemon has no time, or there is none
  if (graves_.size() > kMostGraves) bury_all();
}

bool Mappings::bury_one(Lock& lock) {
  if (graves_.empty() || !streams_.over(graves_.front().after)) return false;
  Grave grave = std::move(graves_.front());
  graves_.pop_front();
  lock.unlock();
  for (const auto& [first, count] : grave.mapped)
    if (!undo(grave.first + first, count)) grave.leaky = true;
  lock.lock();
  if (!grave.leaky) table_.give_addresses(grave.first, grave.count);
  return true;
}

void Mappings::bury_all() {
  while (!graves_.empty()) {
    const Grave& grave = graves_.front();
    if (!streams_.host_waits(grave.after, Edge::kUseBeforeUnmap)) return;
    bool leaky = grave.leaky;
    for (const auto& [first, count] : grave.mapped)
      if (!undo(grave.first + first, count)) leaky = true;
    if (!leaky) table_.give_addresses(grave.first, grave.count);
    graves_.pop_front();
  }
}

// Whether a stale mapping may be there at all. What is mapped at an address only the driver knows.
std::string Mappings::audit() const {
  AuditCheck check;
  for (const Region& region : table_.all())
    for (const RegionOrder::Stale& stale : region.order.stale)
      check.none("stale mappings beyond their region", stale.first + stale.count > region.count || !streams_.on());
  return check.text();
}

}  // namespace ooc
