// What of variables is in host memory: their blocks, which slots of them are valid, and which are used there in place.
//
// A block serves its next variable when the copies from it are done. For a function on host memory the block is a
// mappable one, and the addresses of slots without a chunk lead there; they go on leading there until a chunk comes in.
// Guarded by the core's lock.
//
//   used bytes of the arena == blocks of all regions
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "audit_check.h"
#include "device.h"
#include "geometry.h"
#include "host_arena.h"
#include "region_table.h"
#include "streams.h"

namespace ooc {

class HostCopies {
 public:
  HostCopies(const Geometry& geometry, uint64_t budget_bytes, Device& device, Streams& streams, RegionTable& table)
      : geometry_(geometry),
        device_(device),
        streams_(streams),
        table_(table),
        asked_bytes_(budget_bytes),
        arena_(device.driver(), device.device(), std::max(budget_bytes, geometry.chunk_bytes)) {}

  // A block for the region, if it has none. With `may_reclaim`, resident variables may lose theirs for it. Returns false
  // if there is no memory, or the device is lost; then nothing may be copied out.
  [[nodiscard]] bool ensure(Region* region, bool may_reclaim) {
    if (region->host != nullptr) return true;
    device_.bind_thread();  // the arena pins what it takes
    region->host = arena_.allocate(region->bytes);
    if (region->host == nullptr && may_reclaim && reclaim(region->bytes)) region->host = arena_.allocate(region->bytes);
    if (region->host == nullptr) return false;
    if (wait_for_block(region)) return true;
    arena_.free(region->host, region->bytes);
    region->host = nullptr;
    return false;
  }
  // Where copies out will soon need more of the system's memory, pins it with the lock given up, in one thread at a time.
  // Returns false if there is no need.
  bool pin_ahead(std::unique_lock<std::mutex>& lock) {
    if (!arena_.runs_low()) return false;
    const uint64_t before = arena_.committed();
    lock.unlock();
    arena_.grow_ahead();
    lock.lock();
    arena_.adopt();
    return arena_.committed() > before;
  }
  // The region has no block any more, and its addresses do not lead there.
  void release(Region* region) {
    if (region->host != nullptr) release_block(region);
  }
  char* address(const Region* region, uint32_t slot) const { return region->host + slot * geometry_.chunk_bytes; }
  // Bytes from an address of a block that one copy can take. May be called without the lock.
  uint64_t extent_left(const char* address) const { return arena_.extent_left(address); }

  // The copies of some slots are valid, or none is.
  void validate(const Piece& slots) {
    for (Slot& slot : slots.slots()) slot.host_valid = true;
    slots.region->host_valid += slots.count;
  }
  void invalidate(Region* region) {
    if (region->host_valid == 0) return;
    for (Slot& slot : region->slots) slot.host_valid = false;
    region->host_valid = 0;
  }
  // Somebody writes resident slots: their copies are worth nothing any more, nor are those that are being made.
  void written(Region* region, uint32_t first, uint32_t count) {
    if (region->host_valid > 0 || region->moving > 0) forget(region, first, count);
  }
  void written(Region* region) { written(region, 0, region->count); }

  // ---- in place
  // Throws std::runtime_error if the driver has no memory that can be mapped in place.
  void prepare_in_place() { arena_.prepare_mappable(device_.device(), geometry_.chunk_bytes); }
  // Moves the block of a region, of which nothing moves, to mappable memory. Returns false if there is none left.
  bool make_mappable(Region* region) {
    if (region->host != nullptr && arena_.is_mappable(region->host)) return true;
    char* block = arena_.allocate_mappable(region->bytes);
    if (block == nullptr) return false;
    for (uint32_t i = 0; i < region->count; ++i) {
      const uint64_t offset = i * geometry_.chunk_bytes, bytes = geometry_.bytes_in(region, i, 1);
      if (region->slots[i].host_valid) std::memcpy(block + offset, region->host + offset, bytes);
    }
    release(region);
    region->host = block;
    return wait_for_block(region);
  }
  // The addresses of slots without a chunk lead to the block, which is mappable. Returns false if the driver refused.
  bool show(const Piece& slots) {
    Region* region = slots.region;
    return each_run(slots, &Slot::host_mapped, [&](const Piece& run, bool shown) {
      if (shown) return true;
      char* in_place = geometry_.address(region, run.first);
      const char* block = address(region, run.first);
      if (device_.map_host(in_place, arena_.chunks(), block, run.count) != CUDA_SUCCESS) return false;
      for (Slot& slot : run.slots()) {
        slot.host_mapped = true;
        slot.state = SlotState::kSwapped;  // also if it was blank: its bytes are in host memory now, whatever they are
        if (!slot.host_valid) ++region->host_valid;
        slot.host_valid = true;
      }
      return true;
    });
  }
  // The addresses lead to no block any more. Returns false if the driver refused.
  bool hide(const Piece& slots) {
    return each_run(slots, &Slot::host_mapped, [&](const Piece& run, bool shown) {
      if (!shown) return true;
      char* in_place = geometry_.address(run.region, run.first);
      if (device_.unmap(in_place, run.count * geometry_.chunk_bytes) != CUDA_SUCCESS) return false;
      for (Slot& slot : run.slots()) slot.host_mapped = false;
      return true;
    });
  }

  uint64_t used() const { return arena_.used(); }
  uint64_t budget() const { return arena_.budget(); }
  bool refused_by_system() const { return arena_.refusal() == Refusal::kSystem; }
  std::string describe() const { return arena_.describe(); }
  void fill(ooc_stats& stats) const {
    stats.host_budget_bytes = asked_bytes_;
    stats.host_bytes = stats.host_peak_bytes = arena_.committed();
    stats.host_used_bytes = arena_.used();
    stats.host_unpinned_bytes = arena_.unpinned();
  }
  std::string audit() const {
    AuditCheck check;
    uint64_t blocks = 0;
    for (const Region& region : table_.all()) {
      blocks += region.host != nullptr ? arena_.taken(region.host, region.bytes) : 0;
      uint64_t valid = 0;
      for (const Slot& slot : region.slots) {
        valid += slot.host_valid ? 1 : 0;
        check.none("slots that show a host copy and should not",
                   slot.host_mapped && (slot.resident() || !(region.live || region.doomed)));
        if (!region.live) continue;
        check.none("slots in neither place", !slot.has_chunk() && !slot.host_valid && !slot.blank());
        check.none("blank slots with bytes", slot.blank() && (slot.host_valid || slot.has_chunk()));
        check.none("slots kept in host memory and not there", slot.kept > 0 && (slot.has_chunk() || !slot.host_mapped));
      }
      if (region.live) check.equal("valid host slots of a region", valid, region.host_valid);
    }
    check.equal("host bytes", blocks, arena_.used());
    return check.text();
  }

 private:
  struct Pending {  // a block that was freed while copies from it were under way
    const char* start;
    uint64_t bytes;
    Moments after;
  };
  [[gnu::noinline]] void forget(Region* region, uint32_t first, uint32_t count) {
    for (Slot& slot : Piece{region, first, count}.slots()) {
      slot.overwritten |= slot.copied_out();
      if (!slot.host_valid || !slot.has_chunk()) continue;  // without a chunk the host copy is all there is
      slot.host_valid = false;
      --region->host_valid;
    }
  }
  void release_block(Region* region) {
    const bool used = std::ranges::any_of(region->slots, &Slot::host_mapped) &&
                      !streams_.host_waits(Streams::users(region), Edge::kUseBeforeUnmap);
    if (used || !hide(Piece::whole(region))) {
      region->leaky = true;  // what its addresses lead to stays there, so they serve nobody else
      for (Slot& slot : region->slots) slot.host_mapped = false;
    }
    Moments reads;
    for (const Moment& moment : Streams::arrival(region, 0, region->count))
      if (moment.stream == StreamOrder::kIn) reads.add(moment);
    if (!streams_.over(reads)) pending_.push_back({region->host, arena_.taken(region->host, region->bytes), reads});
    arena_.free(region->host, region->bytes);
    region->host = nullptr;
  }
  bool reclaim(uint64_t bytes) {
    bool any = false;
    for (Region* region = table_.oldest(); region != nullptr; region = region->newer) {
      if (region->host == nullptr || region->moving > 0 || !region->fully_resident()) continue;
      invalidate(region);
      release(region);
      any = true;
      if (arena_.budget() - arena_.used() >= 2 * bytes) break;
    }
    return any;
  }
  // Copies out of a block's next variable wait for the copies in of the variable before.
  [[nodiscard]] bool wait_for_block(const Region* region) {
    const char* end = region->host + arena_.taken(region->host, region->bytes);
    for (size_t i = 0; i < pending_.size();) {
      Pending& block = pending_[i];
      if (streams_.over(block.after)) {
        block = pending_.back();
        pending_.pop_back();
        continue;
      }
      const bool overlaps = block.start < end && region->host < block.start + block.bytes;
      if (overlaps && !streams_.wait(StreamOrder::kOut, block.after, Edge::kInBeforeHost)) return false;
      ++i;
    }
    return true;
  }

  const Geometry& geometry_;
  Device& device_;
  Streams& streams_;
  RegionTable& table_;
  const uint64_t asked_bytes_;
  HostArena arena_;
  std::vector<Pending> pending_;
};

}  // namespace ooc
