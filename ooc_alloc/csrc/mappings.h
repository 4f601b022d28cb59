// Chunks behind the addresses of regions: mapped when a slot gets a chunk, unmapped when the slot loses it.
//
// Where functions run on streams, a chunk goes to its next user as soon as the copy of its contents has been enqueued:
// the next user's stream waits for that copy, the host does not. The chunk is then mapped at two addresses for a while.
// The old mapping (`stale`) is undone when nothing enqueued can touch it any more, and at the latest when its address
// is to be mapped again; of a region that is gone, the addresses are a grave until then. Guarded by the core's lock.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

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
  // the lock may be given up. Returns false if the device is lost; then the addresses may still be in use.
  [[nodiscard]] bool vacate(Lock& lock, const Piece& slots);
  // The same for every region of which nothing moves. Returns false if the device is lost.
  bool vacate_all();

  // Resident slots lose their chunks. Returns false if the driver refused; then the slots are as they were.
  bool unmap(const Piece& slots);
  // Resident slots that hold nothing of value and cannot be unmapped.
  void forget(const Piece& slots);
  // A region that no variable lives in goes. Returns false if the driver refused; then it has some of its chunks still.
  bool destroy(Region* region);

  // A chunk that nobody uses any more once the moments are over.
  void give(Chunk chunk, const std::shared_ptr<const Moments>& after);
  // Who used these chunks, which were just taken from the pool. It is asked once.
  Moments take_users(const Chunk* chunks, uint32_t count);

  // Unmaps the oldest grave if nothing enqueued can touch it. Returns false if there is none such.
  bool bury_one(Lock& lock);
  // Waits for what is enqueued, and unmaps all graves.
  void bury_all();

  void lose(uint64_t chunks) { lost_chunks_ += chunks; }
  uint64_t lost_chunks() const { return lost_chunks_; }  // the driver would not unmap them
  std::string audit() const;

 private:
  struct Grave {
    uint64_t first;
    uint32_t count;
    bool leaky;
    std::vector<std::pair<uint32_t, uint32_t>> mapped;  // first slot, count
    Moments after;
  };
  bool undo(uint64_t first, uint32_t count) {
    return device_.unmap(geometry_.address(first), count * geometry_.chunk_bytes) == CUDA_SUCCESS;
  }
  void bury(Region* region);

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
