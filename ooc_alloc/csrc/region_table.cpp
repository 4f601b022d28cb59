#include "region_table.h"

#include <sys/mman.h>

#include <algorithm>
#include <stdexcept>

#include "audit_check.h"
#include "last_error.h"

namespace ooc {

RegionTable::RegionTable(const Geometry& geometry) : geometry_(geometry), space_(geometry.region_chunks) {
  void* table = mmap(nullptr, geometry_.region_chunks * sizeof(uint32_t), PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (table == MAP_FAILED) throw std::runtime_error("no address space for the table of regions");
  at_ = static_cast<uint32_t*>(table);
}

RegionTable::~RegionTable() { munmap(at_, geometry_.region_chunks * sizeof(uint32_t)); }

bool RegionTable::refuse_bytes(uint64_t bytes) const {
  set_last_error("a variable of " + std::to_string(bytes) + " bytes is larger than the address range for variables (" +
                 std::to_string(geometry_.region_chunks * geometry_.chunk_bytes) + " bytes)");
  return false;
}

Region* RegionTable::make(uint32_t count) {
  const uint64_t first = space_.take(count);
  if (first == AddressSpace::kNone) {
    set_last_error("the address range for regions is used up");
    return nullptr;
  }
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
  std::fill_n(at_ + first, count, region->index + 1);
  return region;
}

void RegionTable::remove(Region* region) {
  std::fill_n(at_ + region->first, region->count, 0u);
  unused_.push_back(region);
}

void RegionTable::cache(Region* region) {
  cached_.append(region);
  if (region->fully_resident()) cached_by_count_[region->count].push_back(region);
  cached_chunks_ += region->resident;
  resident_chunks_ -= region->resident;
}

void RegionTable::uncache(Region* region) {
  cached_.remove(region);
  if (region->fully_resident()) {
    auto& same_size = cached_by_count_[region->count];
    if (same_size.back() == region) same_size.pop_back();
    else same_size.erase(std::find(same_size.begin(), same_size.end(), region));
  }
  cached_chunks_ -= region->resident;
  resident_chunks_ += region->resident;
}

Region* RegionTable::take_cached(uint32_t count) {
  const auto same_size = cached_by_count_.find(count);
  if (same_size == cached_by_count_.end() || same_size->second.empty()) return nullptr;
  Region* region = same_size->second.back();
  uncache(region);
  ++cache_hits_;
  return region;
}

void RegionTable::fill(ooc_stats& stats) const {
  stats.region_live_bytes = live_bytes_;
  stats.cached_bytes = cached_chunks_ * geometry_.chunk_bytes;
  stats.resident_bytes = resident_chunks_ * geometry_.chunk_bytes;
  stats.cache_hits = cache_hits_;
}

std::string RegionTable::audit() const {
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
    live_bytes += region.live ? region.bytes : 0;
    live_chunks += region.live ? region.count : 0;
  }
  check.equal("live bytes of regions", live_bytes, live_bytes_);
  check.equal("live region chunks", live_chunks, live_chunks_);
  check.equal("resident chunks", resident, resident_chunks_);
  check.equal("cached chunks", cached, cached_chunks_);
  return check.text();
}

}  // namespace ooc
