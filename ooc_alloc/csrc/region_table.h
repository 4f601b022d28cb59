// The table of regions: which one lies at an address, which are live, by last use, and which were freed and kept their
// chunks for the next variables, whatever their size. It knows of chunks only how many there are. Guarded by the core's lock.
//
//   resident_chunks() == chunks of live and doomed regions, those that arrive left out
//   cached_chunks()   == chunks of cached regions
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <deque>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

#include "audit_check.h"
#include "free_extents.h"
#include "geometry.h"
#include "last_error.h"
#include "ooc_alloc.h"
#include "region.h"

namespace ooc {

class RegionTable {
 public:
  // throws std::runtime_error
  explicit RegionTable(const Geometry& geometry) : geometry_(geometry), space_(0, geometry.region_chunks) {
    // What lies behind the table cannot be written: a region of slabs has no entry.
    void* table = mmap(nullptr, table_bytes() + kGuard, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (table == MAP_FAILED || mprotect(table, table_bytes(), PROT_READ | PROT_WRITE) != 0)
      throw std::runtime_error("no address space for the table of regions");
    at_ = static_cast<uint32_t*>(table);
  }
  ~RegionTable() { munmap(at_, table_bytes() + kGuard); }
  RegionTable(const RegionTable&) = delete;
  RegionTable& operator=(const RegionTable&) = delete;

  // The live region over an address, or null.
  Region* find(const void* address) {
    if (!geometry_.owns(address)) return nullptr;
    const uint64_t chunk = geometry_.chunk_of(geometry_.offset(address));
    if (chunk >= geometry_.region_chunks || at_[chunk] == 0) return nullptr;
    Region* region = &regions_[at_[chunk] - 1];
    return region->live ? region : nullptr;
  }
  // The region of a handle that was given out as a number, whether that variable lives or not; null for a wrong number.
  Region* numbered(uint64_t index) { return index < regions_.size() ? &regions_[index] : nullptr; }

  // A region without chunks that no variable lives in. Null, with an error, if there are no such addresses left.
  Region* make(uint32_t count) {
    const uint64_t first = space_.take_lowest(count);
    if (first == FreeExtents::kNone) {
      set_last_error("the address range for regions is used up");
      return nullptr;
    }
    Region* region = make_at(first, count);
    std::fill_n(at_ + first, count, region->index + 1);
    return region;
  }
  // A region that stands for slabs at their addresses, where nobody finds it; it counts as no variable.
  Region* lay_over(uint64_t first, uint32_t count) {
    Region* region = make_at(first, count);
    region->live = true;
    region->bytes = count * geometry_.chunk_bytes;
    region->in_ranges = false;
    region->place = 0;
    region->iteration = 0;
    region->variable = -1;
    used_.append(region);
    return region;
  }
  bool stands_for_slabs(const Region* region) const { return region->first >= geometry_.region_chunks; }
  void take_off(Region* region) {
    end_generation(region);
    unused_.push_back(region);
  }
  // Whether a variable of that size fits the addresses at all; else there is an error.
  bool fits(uint64_t bytes) const {
    return bytes <= geometry_.region_chunks * geometry_.chunk_bytes || refuse_bytes(bytes);
  }
  // The region, without chunks, is no longer found; give_addresses() comes when nothing is mapped there any more.
  void remove(Region* region) {
    std::fill_n(at_ + region->first, region->count, 0u);
    unused_.push_back(region);
  }
  void give_addresses(uint64_t first, uint64_t count) { space_.give(first, count); }

  // A variable begins or ends in the region.
  void begin_variable(Region* region, uint64_t bytes) {
    region->live = true;
    region->bytes = bytes;
    region->place = 0;
    region->iteration = 0;
    region->variable = -1;
    used_.append(region);
    live_chunks_ += region->count;
    live_bytes_ += bytes;
  }
  void end_variable(Region* region) {
    live_bytes_ -= region->bytes;
    live_chunks_ -= region->count;
    end_generation(region);
  }

  // Slots of the region got chunks with bytes, or lost them.
  void gained(Region* region, uint32_t slots) {
    region->resident += slots;
    resident_chunks_ += slots;
  }
  void lost(Region* region, uint32_t slots) {
    region->resident -= slots;
    resident_chunks_ -= slots;
  }

  // Freed regions that keep their chunks.
  void cache(Region* region) {
    region->cached = true;
    cached_.append(region);
    if (region->fully_resident()) cached_by_count_[region->count].push_back(region);
    cached_chunks_ += region->resident;
    resident_chunks_ -= region->resident;
  }
  // So many cached chunks in a row, as one region that is cached no more; null if there are none. A region of that size
  // comes first: the newest that can be used at once, idle(region), or else the newest. Then part of a larger one, or
  // neighbours together, all of which can be used at once. With `incomplete` there may be free addresses between and behind
  // them: slots without chunks.
  template <class Idle>
  Region* take_cached(uint32_t count, bool incomplete, Idle idle) {
    Region* region = cached_of_size(count, idle);
    if (region == nullptr) region = first_of_neighbours(count, incomplete, idle);
    if (region == nullptr) return nullptr;
    uncache(region);
    while (region->count < count) join(region, count);
    if (region->count > count) cache(split(region, count));
    if (region->fully_resident()) ++cache_hits_;
    return region;
  }
  // The cached region that was freed first, cached no more; null if none is.
  Region* take_oldest_cached() {
    Region* region = cached_.oldest();
    if (region != nullptr) uncache(region);
    return region;
  }

  // Live regions, the one used least recently first: go on with Region::newer.
  Region* oldest() const { return used_.oldest(); }
  void touch(Region* region) { used_.touch(region); }

  std::deque<Region>& all() { return regions_; }
  const std::deque<Region>& all() const { return regions_; }

  uint64_t live_bytes() const { return live_bytes_; }
  uint64_t live_chunks() const { return live_chunks_; }
  uint64_t resident_chunks() const { return resident_chunks_; }
  uint64_t cached_chunks() const { return cached_chunks_; }
  void fill(ooc_stats& stats) const {
    stats.region_live_bytes = live_bytes_;
    stats.cached_bytes = cached_chunks_ * geometry_.chunk_bytes;
    stats.resident_bytes = resident_chunks_ * geometry_.chunk_bytes;
    stats.cache_hits = cache_hits_;
  }
  // Recounts by walking all regions. Empty if the counters agree.
  std::string audit() const {
    AuditCheck check;
    uint64_t live_bytes = 0, live_chunks = 0, resident = 0, cached = 0;
    for (const Region& region : regions_) {
      uint64_t here = 0, with_chunk = 0;
      for (const Slot& slot : region.slots) {
        here += slot.resident() ? 1 : 0;
        with_chunk += slot.has_chunk() ? 1 : 0;
        const bool needs_chunk = slot.resident() || slot.arriving();
        check.none("slots whose state says nothing of their chunk", slot.has_chunk() != needs_chunk);
        if (!region.live) check.none("blank slots of a freed region", slot.blank() && !region.doomed);
      }
      check.equal("resident slots of a region", here, region.resident);
      (region.live || region.doomed ? resident : cached) += region.live || region.doomed ? here : with_chunk;
      live_bytes += is_variable(region) ? region.bytes : 0;
      live_chunks += is_variable(region) ? region.count : 0;
    }
    check.equal("live bytes of regions", live_bytes, live_bytes_);
    check.equal("live region chunks", live_chunks, live_chunks_);
    check.equal("resident chunks", resident, resident_chunks_);
    check.equal("cached chunks", cached, cached_chunks_);
    return check.text();
  }

 private:
  static constexpr size_t kGuard = 1 << 16;
  size_t table_bytes() const { return geometry_.region_chunks * sizeof(uint32_t); }
  bool is_variable(const Region& region) const { return region.live && !stands_for_slabs(&region); }

  // Whoever has a handle of what lived there has none any more, nor do those count who needed its block.
  void end_generation(Region* region) {
    region->live = false;
    ++region->generation;
    region->lifted = 0;
    used_.remove(region);
  }
  void uncache(Region* region) {
    region->cached = false;
    cached_.remove(region);
    if (region->fully_resident()) {
      auto& same_size = cached_by_count_[region->count];
      if (same_size.back() == region) same_size.pop_back();
      else same_size.erase(std::find(same_size.begin(), same_size.end(), region));
    }
    cached_chunks_ -= region->resident;
    resident_chunks_ += region->resident;
  }
  template <class Idle>
  Region* cached_of_size(uint32_t count, Idle idle) {
    const auto same_size = cached_by_count_.find(count);
    if (same_size == cached_by_count_.end() || same_size->second.empty()) return nullptr;
    constexpr std::ptrdiff_t kMostAsked = 8;
    const auto newest = same_size->second.rbegin();
    const auto end = newest + std::min(kMostAsked, std::ssize(same_size->second));
    const auto found = std::find_if(newest, end, idle);
    return found != end ? *found : *newest;
  }
  // Of those neighbours that hold most of so many chunks, and the least beyond them, among the newest.
  template <class Idle>
  Region* first_of_neighbours(uint32_t count, bool incomplete, Idle idle) {
    constexpr int kMostAsked = 32;
    Region* best = nullptr;
    uint64_t most = 0, least = 0;
    int asked = 0;
    for (Region* first = cached_.newest(); first != nullptr && asked < kMostAsked; first = first->older, ++asked) {
      uint64_t end = first->first, held = 0;
      while (end - first->first < count) {
        const Region* next = whole_at(end);
        const uint64_t free = next == nullptr && incomplete ? space_.free_from(end) : 0;
        if (next != nullptr ? !idle(next) : free == 0) break;
        held += next != nullptr ? next->count : 0;
        end += next != nullptr ? next->count : free;
      }
      const uint64_t length = end - first->first;
      held = std::min<uint64_t>(held, count);
      if (length < count || held < most || (held == most && length >= least)) continue;
      best = first;
      most = held;
      least = length;
    }
    return best;
  }
  // Whether a freed region can become part of another one, or be divided.
  static bool whole(const Region* region) { return region->fully_resident() && !region->leaky; }
  // The cached region at an address, if it is whole; else null.
  Region* whole_at(uint64_t chunk) {
    if (chunk >= geometry_.region_chunks || at_[chunk] == 0) return nullptr;
    Region* region = &regions_[at_[chunk] - 1];
    return region->cached && whole(region) ? region : nullptr;
  }
  // The slots of a whole region from `count` on become one of their own; who used the memory may have used either.
  Region* split(Region* region, uint32_t count) {
    Region* rest = make_at(region->first + count, region->count - count);
    std::fill_n(at_ + rest->first, rest->count, rest->index + 1);
    std::copy_n(region->slots.begin() + count, rest->count, rest->slots.begin());
    rest->resident = rest->count;
    rest->order = region->order;
    region->slots.resize(count);
    region->resident -= rest->count;
    region->count = count;
    return rest;
  }
  // What comes behind the region becomes part of it: a cached region, or free addresses up to so many chunks in all.
  void join(Region* region, uint32_t count) {
    const uint64_t end = region->first + region->count;
    Region* behind = whole_at(end);
    if (behind == nullptr) {
      const uint64_t free = std::min<uint64_t>(space_.free_from(end), count - region->count);
      space_.take_at(end, free);
      behind = make_at(end, static_cast<uint32_t>(free));
    } else {
      uncache(behind);
    }
    std::fill_n(at_ + behind->first, behind->count, region->index + 1);
    region->slots.insert(region->slots.end(), behind->slots.begin(), behind->slots.end());
    region->count += behind->count;
    region->resident += behind->resident;
    region->order.arrival.add(behind->order.arrival);
    region->order.out.add(behind->order.out);
    behind->slots.clear();
    behind->resident = behind->count = 0;
    unused_.push_back(behind);
  }
  Region* make_at(uint64_t first, uint32_t count) {
    Region* region;
    if (unused_.empty()) {
      regions_.emplace_back();
      region = &regions_.back();
      region->index = static_cast<uint32_t>(regions_.size() - 1);
    } else {
      region = unused_.back();
      unused_.pop_back();
    }
    region->first = first;
    region->count = count;
    region->slots.assign(count, Slot{});
    region->resident = region->moving = region->host_valid = region->pinned_slots = 0;
    region->leaky = false;
    region->whole_iteration = 0;
    region->order = {};
    return region;
  }
  [[gnu::cold]] bool refuse_bytes(uint64_t bytes) const {
    set_last_error("a variable of " + std::to_string(bytes) + " bytes is larger than the address range for variables (" +
                   std::to_string(geometry_.region_chunks * geometry_.chunk_bytes) + " bytes)");
    return false;
  }

  const Geometry& geometry_;
  FreeExtents space_;
  std::deque<Region> regions_;
  std::vector<Region*> unused_;
  uint32_t* at_ = nullptr;  // [region_chunks] index + 1 of the region over an address chunk; lazily committed
  RegionList used_;
  RegionList cached_;       // by time of free
  std::unordered_map<uint32_t, std::vector<Region*>> cached_by_count_;
  uint64_t live_bytes_ = 0, live_chunks_ = 0, resident_chunks_ = 0, cached_chunks_ = 0;
  uint64_t cache_hits_ = 0;
};

}  // namespace ooc
