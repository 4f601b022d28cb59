// Small allocations, sub-allocated in slabs that stay resident: a two-level segregated fit (Masmano et al., "TLSF: a new
// dynamic memory allocator for real-time systems", ECRTS 2004) whose bookkeeping lies outside the managed memory, which
// the host cannot touch on a GPU. Works in granules over an address range that is backed chunk by chunk, on demand:
// a chunk under no allocation can be taken back at any time.
//
// Invariants: the blocks of the range tile it; no two neighbours are both free; users(c) = allocations overlapping chunk c.
#pragma once

#include <cstdint>
#include <vector>

#include "divisor.h"

namespace ooc {

class SmallHeap {
 public:
  static constexpr uint32_t kNone = ~uint32_t{0};

  // range_bytes must be a multiple of chunk_bytes; granule_bytes a power of two.
  SmallHeap(uint64_t range_bytes, uint64_t chunk_bytes, uint64_t granule_bytes);
  ~SmallHeap();
  SmallHeap(const SmallHeap&) = delete;
  SmallHeap& operator=(const SmallHeap&) = delete;

  // Offset of a block of at least `bytes`, or kFailed. The caller backs its chunks.
  static constexpr uint64_t kFailed = ~uint64_t{0};
  uint64_t allocate(uint64_t bytes);
  // Bytes that the allocation had asked for; 0 if offset is not the start of an allocation.
  uint64_t free(uint64_t offset);

  uint64_t first_chunk(uint64_t offset) const { return chunk_of_(offset); }
  uint64_t last_chunk(uint64_t offset) const;
  // Requested size of the allocation at an offset.
  uint64_t requested(uint64_t offset) const;
  template <class Visit>
  void each_allocation(Visit visit) const;  // visit(offset, requested bytes), ascending; for audits

 private:
  struct Block {
    uint32_t start, size;          // granules
    uint32_t before, after;        // neighbours in address order
    uint32_t bin_before, bin_after;
    uint32_t requested;            // bytes; 0: free
  };
  static constexpr int kSecond = 16;  // second-level bins per power of two

  void bin_of(uint32_t size, int& first, int& second) const;
  void insert(uint32_t block);
  void remove(uint32_t block);
  uint32_t find(uint32_t size) const;
  uint32_t new_block();
  uint32_t& block_at(uint32_t granule) { return starts_[granule]; }

  uint64_t granule_bytes_, granules_;
  Divisor chunk_of_, granule_of_;
  std::vector<Block> blocks_;
  std::vector<uint32_t> unused_;
  uint32_t* starts_;  // granule -> block that starts there (+1), lazily committed
  uint32_t bins_[32][kSecond];
  uint32_t first_map_ = 0;
  uint32_t second_map_[32] = {};
};

template <class Visit>
void SmallHeap::each_allocation(Visit visit) const {
  for (uint32_t b = starts_[0] - 1; b != kNone; b = blocks_[b].after)
    if (blocks_[b].requested != 0) visit(blocks_[b].start * granule_bytes_, uint64_t{blocks_[b].requested});
}

}  // namespace ooc
