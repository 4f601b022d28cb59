// The table of regions: which one lies at an address, which are live, by last use, and which were freed and kept their
// chunks for the next variable of that size. It knows of chunks only how many there are. Guarded by the core's lock.
//
//   resident_chunks() == chunks of live and doomed regions, those that arrive left out
//   cached_chunks()   == chunks of cached regions
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <unordered_map>
#include <vector>

#include "address_space.h"
#include "geometry.h"
#include "ooc_alloc.h"
#include "region.h"

namespace ooc {

class RegionTable {
 public:
  explicit RegionTable(const Geometry& geometry);  // throws std::runtime_error
  ~RegionTable();
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
  Region* make(uint32_t count);
  // Whether a variable of that size fits the addresses at all; else there is an error.
  bool fits(uint64_t bytes) const {
    return bytes <= geometry_.region_chunks * geometry_.chunk_bytes || refuse_bytes(bytes);
  }
  // The region, without chunks, is no longer found; give_addresses() comes when nothing is mapped there any more.
  void remove(Region* region);
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
    region->live = false;
    ++region->generation;
    used_.remove(region);
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
  void cache(Region* region);
  void uncache(Region* region);
  Region* oldest_cached() const { return cached_.oldest(); }
  // A cached region of exactly so many chunks, uncached; null if there is none.
  Region* take_cached(uint32_t count);

  // Live regions, the one used least recently first: go on with Region::newer.
  Region* oldest() const { return used_.oldest(); }
  void touch(Region* region) { used_.touch(region); }

  std::deque<Region>& all() { return regions_; }
  const std::deque<Region>& all() const { return regions_; }

  uint64_t live_bytes() const { return live_bytes_; }
  uint64_t live_chunks() const { return live_chunks_; }
  uint64_t resident_chunks() const { return resident_chunks_; }
  uint64_t cached_chunks() const { return cached_chunks_; }
  void fill(ooc_stats& stats) const;
  // Recounts by walking all regions. Empty if the counters agree.
  std::string audit() const;

 private:
  [[gnu::cold]] bool refuse_bytes(uint64_t bytes) const;

  const Geometry& geometry_;
  AddressSpace space_;
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
