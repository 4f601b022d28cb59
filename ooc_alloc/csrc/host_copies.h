// What of variables is in host memory: their blocks, which slots of them are valid, and which are used there in place.
//
// A block serves its next variable when the copies from it are done. For a function on host memory the block is a
// mappable one, and the addresses of slots without a chunk lead there; they go on leading there until a chunk comes in.
// Guarded by the core's lock.
//
//   used bytes of the arena == blocks of all regions
#pragma once

#include <cstdint>
#include <string>
#include <vector>

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
        arena_(device.driver(), std::max(budget_bytes, geometry.chunk_bytes)) {}

  // A block for the region, if it has none. With `reclaim`, resident variables may lose theirs for it. Returns false if
  // there is no memory, or the device is lost; then nothing may be copied out.
  [[nodiscard]] bool ensure(Region* region, bool reclaim);
  // The region has no block any more, and its addresses do not lead there.
  void release(Region* region) {
    if (region->host != nullptr) release_block(region);
  }
  char* address(const Region* region, uint32_t slot) const { return region->host + slot * geometry_.chunk_bytes; }
  // Bytes from an address of a block that one copy can take. May be called without the lock.
  uint64_t extent_left(const char* address) const { return arena_.extent_left(address); }

  // The copies of some slots are valid, or none is.
  void validate(const Piece& slots);
  void invalidate(Region* region);
  // Somebody writes resident slots: their copies are worth nothing any more, nor are those that are being made.
  void written(Region* region, uint32_t first, uint32_t count) {
    if (region->host_valid > 0 || region->moving > 0) forget(region, first, count);
  }
  void written(Region* region) { written(region, 0, region->count); }

  // ---- in place
  // Throws std::runtime_error if the driver has no memory that can be mapped in place.
  void prepare_in_place() { arena_.prepare_mappable(device_.device(), geometry_.chunk_bytes); }
  // Moves the block of a region, of which nothing moves, to mappable memory. Returns false if there is none left.
  bool make_mappable(Region* region);
  // The addresses of slots without a chunk lead to the block, which is mappable. Returns false if the driver refused.
  bool show(const Piece& slots);
  // The addresses lead to no block any more. Returns false if the driver refused.
  bool hide(const Piece& slots);

  uint64_t used() const { return arena_.used(); }
  uint64_t budget() const { return arena_.budget(); }
  bool refused_by_system() const { return arena_.refusal() == Refusal::kSystem; }
  std::string describe() const { return arena_.describe(); }
  void fill(ooc_stats& stats) const;
  std::string audit() const;

 private:
  struct Pending {  // a block that was freed while copies from it were under way
    const char* start;
    uint64_t bytes;
    Moments after;
  };
  [[gnu::noinline]] void forget(Region* region, uint32_t first, uint32_t count);
  void release_block(Region* region);
  bool reclaim(uint64_t bytes);
  [[nodiscard]] bool wait_for_block(const Region* region);

  const Geometry& geometry_;
  Device& device_;
  Streams& streams_;
  RegionTable& table_;
  const uint64_t asked_bytes_;
  HostArena arena_;
  std::vector<Pending> pending_;
};

}  // namespace ooc
