// Chunks behind the addresses of regions: mapped when a slot gets a chunk, unmapped when the slot loses it.
//
// Where functions run on streams, a chunk goes to its next user as soon as the copy of its contents has been enqueued:
// the next user's stream waits for that copy, the host does not. The chunk is then mapped at two addresses for a while.
// The old mapping (`stale`) is undone when nothing enqueued can touch it any more, and at the latest when its address
// is to be mapped again; of a region that is gone, the addresses are a grave until then. Guarded by the core's lock.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "audit_check.h"
#include "chunk_pool.h"
#include "device.h"
#include "geometry.h"
#include "region_table.h"
#include "streams.h"
#include "transfer.h"

namespace ooc {

class Mappings {
 public:
  Mappings(const Geometry& geometry, Device& device, ChunkPool& pool, Streams& streams, RegionTable& table)
      : geometry_(geometry), device_(device), pool_(pool), streams_(streams), table_(table) {}

  // Maps chunks behind the slots, whose addresses are vacant. May be called without the lock.
  CUresult map(const Piece& slots, const Chunk* chunks) {
    return map(geometry_.address(slots.region, slots.first), chunks, slots.count);
  }
  CUresult map(char* address, const Chunk* chunks, uint32_t count) {
    return device_.map(address, chunks, count, pool_, geometry_.chunk_bytes);
  }
  // What the slots' addresses are still mapped to is unmapped, once nobody uses it. The slots are marked as moving, as
  // the lock is given up meanwhile; the mappings of their neighbours, which others may bring in, stay as they are. Returns
  // false if the device is lost; then the addresses may still be in use.
  [[nodiscard]] bool vacate(Lock& lock, const Piece& slots) {
    auto& stale = slots.region->order.stale;
    const auto next = [&] {
      return std::ranges::find_if(stale, [&](const RegionOrder::Stale& old) {
        return old.first < slots.end() && slots.first < old.end();
      });
    };
    for (auto at = next(); at != stale.end(); at = next()) {
      const RegionOrder::Stale old = *at;
      stale.erase(at);
      const uint32_t first = std::max(old.first, slots.first), end = std::min(old.end(), slots.end());
      if (old.first < first) stale.push_back({old.first, first - old.first, old.after});
      if (end < old.end()) stale.push_back({end, old.end() - end, old.after});
      if (!streams_.host_waits(lock, old.after, Edge::kUseBeforeUnmap)) {
        stale.push_back({first, end - first, old.after});
        return false;
      }
      lock.unlock();
      undo(slots.region->first + first, end - first);
      lock.lock();
    }
    return true;
  }
  // The same for every region of which nothing moves. Returns false if the device is lost.
  bool vacate_all() {
    for (Region& region : table_.all()) {
      if (region.moving > 0) continue;  // the owner of the transition may be at it
      for (auto& stale = region.order.stale; !stale.empty(); stale.pop_back()) {
        if (!streams_.host_waits(stale.back().after, Edge::kUseBeforeUnmap)) return false;
        if (!undo(region.first + stale.back().first, stale.back().count)) region.leaky = true;
      }
    }
    return true;
  }

  // Resident slots lose their chunks. Returns false if the driver refused; then the slots are as they were. The first way,
  // for slots that are marked as moving, gives the lock up, as the driver takes long: meanwhile nobody can use them, as if
  // they arrived.
  bool unmap(Lock& lock, const Piece& slots) {
    if (streams_.on()) return unmap(slots);
    Region* region = slots.region;
    for (Slot& slot : slots.slots()) slot.state = SlotState::kArriving;
    table_.lost(region, slots.count);
    lock.unlock();
    const bool undone = undo(region->first + slots.first, slots.count);
    lock.lock();
    for (Slot& slot : slots.slots()) slot.state = SlotState::kResident;
    if (!undone) table_.gained(region, slots.count);
    for (Slot& slot : slots.slots())
      if (undone) give(slot.take(), nullptr);
    return undone;
  }
  bool unmap(const Piece& slots) {
    Region* region = slots.region;
    std::shared_ptr<const Moments> after;
    if (streams_.on()) {
      after = std::make_shared<const Moments>(Streams::users(region, slots.first, slots.count));
      region->order.stale.push_back({slots.first, slots.count, *after});
    } else if (!undo(region->first + slots.first, slots.count)) {
      return false;
    }
    for (Slot& slot : slots.slots()) give(slot.take(), after);
    table_.lost(region, slots.count);
    return true;
  }
  // Resident slots that hold nothing of value and cannot be unmapped.
  void forget(const Piece& slots) {
    for (Slot& slot : slots.slots()) slot.take();
    slots.region->leaky = true;
    lost_chunks_ += slots.count;
    table_.lost(slots.region, slots.count);
  }
  // A region that no variable lives in goes. Returns false if the driver refused; then it has some of its chunks still.
  bool destroy(Region* region) {
    const auto unmap_run = [this](const Piece& run, bool has_chunks) { return !has_chunks || unmap(run); };
    if (!each_run(Piece::whole(region), &Slot::has_chunk, unmap_run)) return false;
    if (table_.stands_for_slabs(region)) {  // whose addresses are not the table's to give
      table_.take_off(region);
      return true;
    }
    table_.remove(region);
    if (streams_.on()) bury(region);
    else if (!region->leaky) table_.give_addresses(region->first, region->count);
    return true;
  }

  // A chunk that nobody uses any more once the moments are over.
  void give(Chunk chunk, const std::shared_ptr<const Moments>& after) {
    if (after) {
      const auto index = static_cast<size_t>(chunk);
      if (users_.size() <= index) users_.resize(index + 1);
      users_[index] = after;
    }
    pool_.give(chunk);
  }
  // Who used these chunks, which were just taken from the pool. It is asked once.
  Moments take_users(const Chunk* chunks, uint32_t count) {
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

  // A region without chunks that no variable lives in. As many graves are undone as are dug, and where addresses run short
  // all that nobody can touch any more; in the end the host waits for the others. Null, with an error, if there are no
  // addresses left. The lock may be given up.
  Region* make(Lock& lock, uint32_t count) {
    bury_one(lock);
    Region* region = table_.make(count);
    while (region == nullptr && bury_one(lock)) region = table_.make(count);
    if (region != nullptr || graves_.empty()) return region;
    bury_all();
    return table_.make(count);
  }
  // Unmaps the oldest grave if nothing enqueued can touch it. Returns false if there is none such.
  bool bury_one(Lock& lock) {
    if (graves_.empty() || !streams_.over(graves_.front().after)) return false;
    const Grave grave = std::move(graves_.front());
    graves_.pop_front();
    lock.unlock();
    const bool vacant = undo(grave);
    lock.lock();
    if (vacant) table_.give_addresses(grave.first, grave.count);
    return true;
  }
  // Waits for what is enqueued, and unmaps all graves.
  void bury_all() {
    while (!graves_.empty()) {
      const Grave& grave = graves_.front();
      if (!streams_.host_waits(grave.after, Edge::kUseBeforeUnmap)) return;
      if (undo(grave)) table_.give_addresses(grave.first, grave.count);
      graves_.pop_front();
    }
  }

  void lose(uint64_t chunks) { lost_chunks_ += chunks; }
  uint64_t lost_chunks() const { return lost_chunks_; }  // the driver would not unmap them
  // Whether a stale mapping may be there at all. What is mapped at an address only the driver knows.
  std::string audit() const {
    AuditCheck check;
    for (const Region& region : table_.all())
      for (const RegionOrder::Stale& stale : region.order.stale)
        check.none("stale mappings beyond their region", stale.first + stale.count > region.count || !streams_.on());
    return check.text();
  }

 private:
  struct Grave {
    uint64_t first;
    uint32_t count;
    bool leaky;
    std::vector<RegionOrder::Stale> mapped;
    Moments after;  // of all that is mapped
  };
  bool undo(uint64_t first, uint32_t count) {
    return device_.unmap(geometry_.address(first), count * geometry_.chunk_bytes) == CUDA_SUCCESS;
  }
  // Returns whether the addresses can be used again.
  bool undo(const Grave& grave) {
    bool vacant = !grave.leaky;
    for (const RegionOrder::Stale& stale : grave.mapped) vacant &= undo(grave.first + stale.first, stale.count);
    return vacant;
  }
  // The region's slots have lost their chunks; the addresses are unmapped later.
  void bury(Region* region) {
    Grave grave{region->first, region->count, region->leaky, std::exchange(region->order.stale, {}), {}};
    for (const RegionOrder::Stale& stale : grave.mapped) grave.after.add(stale.after);
    graves_.push_back(std::move(grave));
  }

  const Geometry& geometry_;
  Device& device_;
  ChunkPool& pool_;
  Streams& streams_;
  RegionTable& table_;
  std::vector<std::shared_ptr<const Moments>> users_;  // [chunks] of free ones: who used them last
  std::deque<Grave> graves_;
  uint64_t lost_chunks_ = 0;
};

}  // namespace ooc
