// Small allocations, sub-allocated in slabs that stay resident: a two-level segregated fit (Masmano et al., "TLSF: a new
// dynamic memory allocator for real-time systems", ECRTS 2004) whose bookkeeping lies outside the managed memory, which
// the host cannot touch on a GPU. Works in granules over an address range that is backed chunk by chunk, on demand:
// a chunk under no allocation can be taken back at any time.
//
// Invariants: the blocks of the range tile it; no two neighbours are both free; users(c) = allocations overlapping chunk c.
#pragma once

#include <sys/mman.h>

#include <cstdint>
#include <stdexcept>
#include <vector>

#include "divisor.h"

namespace ooc {

class SmallHeap {
 public:
  static constexpr uint32_t kNone = ~uint32_t{0};

  // range_bytes must be a multiple of chunk_bytes; granule_bytes a power of two.
  SmallHeap(uint64_t range_bytes, uint64_t chunk_bytes, uint64_t granule_bytes)
      : granule_bytes_(granule_bytes),
        granules_(range_bytes / granule_bytes),
        chunk_of_(chunk_bytes),
        granule_of_(granule_bytes) {
    void* table = mmap(nullptr, granules_ * sizeof(uint32_t), PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (table == MAP_FAILED) throw std::runtime_error("no address space for the table of small variables (mmap failed)");
    starts_ = static_cast<uint32_t*>(table);
    for (auto& row : bins_)
      for (auto& bin : row) bin = kNone;
    const uint32_t whole = new_block();
    blocks_[whole] = {0, static_cast<uint32_t>(granules_), kNone, kNone, kNone, kNone, 0};
    block_at(0) = whole + 1;
    insert(whole);
  }
  ~SmallHeap() { munmap(starts_, granules_ * sizeof(uint32_t)); }
  SmallHeap(const SmallHeap&) = delete;
  SmallHeap& operator=(const SmallHeap&) = delete;

  // Offset of a block of at least `bytes`, or kFailed. The caller backs its chunks. `likes(offset, bytes)` is asked of the
  // first few blocks that would do; if it likes none, the first one is taken.
  static constexpr uint64_t kFailed = ~uint64_t{0};
  uint64_t allocate(uint64_t bytes) {
    return allocate(bytes, [](uint64_t, uint64_t) { return true; });
  }
  template <class Likes>
  uint64_t allocate(uint64_t bytes, Likes likes) {
    const uint64_t granules = bytes == 0 ? 1 : granule_of_(bytes + granule_bytes_ - 1);
    if (bytes > UINT32_MAX || granules > granules_) return kFailed;
    const auto size = static_cast<uint32_t>(granules);
    const uint32_t found = find(size, likes);
    if (found == kNone) return kFailed;
    remove(found);
    if (blocks_[found].size > size) {  // the tail stays free
      const uint32_t rest = new_block();
      Block& b = blocks_[found];
      blocks_[rest] = {b.start + size, b.size - size, found, b.after, kNone, kNone, 0};
      if (b.after != kNone) blocks_[b.after].before = rest;
      b.after = rest;
      b.size = size;
      block_at(blocks_[rest].start) = rest + 1;
      insert(rest);
    }
    blocks_[found].requested = bytes == 0 ? 1 : static_cast<uint32_t>(bytes);
    return uint64_t{blocks_[found].start} * granule_bytes_;
  }
  // Bytes that the allocation had asked for; 0 if offset is not the start of an allocation.
  uint64_t free(uint64_t offset) {
    const uint64_t bytes = requested(offset);
    if (bytes == 0) return 0;
    uint32_t block = block_at(static_cast<uint32_t>(granule_of_(offset))) - 1;
    blocks_[block].requested = 0;
    const uint32_t after = blocks_[block].after, before = blocks_[block].before;
    if (after != kNone && blocks_[after].requested == 0) {
      remove(after);
      absorb_next(block);
    }
    if (before != kNone && blocks_[before].requested == 0) {
      remove(before);
      absorb_next(before);
      block = before;
    }
    insert(block);
    return bytes;
  }

  uint64_t chunk_at(uint64_t offset) const { return chunk_of_(offset); }
  uint64_t last_chunk(uint64_t offset) const {
    const Block& b = blocks_[starts_[granule_of_(offset)] - 1];
    return chunk_of_(uint64_t{b.start + b.size} * granule_bytes_ - 1);
  }
  // Requested size of the allocation at an offset.
  uint64_t requested(uint64_t offset) const {
    if ((offset & (granule_bytes_ - 1)) != 0) return 0;
    const uint32_t block = starts_[granule_of_(offset)];
    return block == 0 ? 0 : blocks_[block - 1].requested;
  }
  // visit(offset, requested bytes), ascending; for audits
  template <class Visit>
  void each_allocation(Visit visit) const {
    for (uint32_t b = starts_[0] - 1; b != kNone; b = blocks_[b].after)
      if (blocks_[b].requested != 0) visit(blocks_[b].start * granule_bytes_, uint64_t{blocks_[b].requested});
  }

 private:
  struct Block {
    uint32_t start, size;          // granules
    uint32_t before, after;        // neighbours in address order
    uint32_t bin_before, bin_after;
    uint32_t requested;            // bytes; 0: free
  };
  static constexpr int kSecond = 16;  // second-level bins per power of two

  // Sizes below kSecond granules have a bin each (first == 0); above, `first` counts powers of two.
  void bin_of(uint32_t size, int& first, int& second) const {
    if (size < kSecond) {
      first = 0;
      second = static_cast<int>(size);
      return;
    }
    const int log = 31 - __builtin_clz(size);
    first = log - 3;  // log2(kSecond) == 4
    second = static_cast<int>(size >> (log - 4)) & (kSecond - 1);
  }
  void insert(uint32_t block) {
    int first, second;
    bin_of(blocks_[block].size, first, second);
    uint32_t& head = bins_[first][second];
    blocks_[block].bin_before = kNone;
    blocks_[block].bin_after = head;
    if (head != kNone) blocks_[head].bin_before = block;
    head = block;
    first_map_ |= 1u << first;
    second_map_[first] |= 1u << second;
  }
  void remove(uint32_t block) {
    int first, second;
    const Block& b = blocks_[block];
    bin_of(b.size, first, second);
    if (b.bin_before != kNone) blocks_[b.bin_before].bin_after = b.bin_after;
    else bins_[first][second] = b.bin_after;
    if (b.bin_after != kNone) blocks_[b.bin_after].bin_before = b.bin_before;
    if (bins_[first][second] != kNone) return;
    second_map_[first] &= ~(1u << second);
    if (second_map_[first] == 0) first_map_ &= ~(1u << first);
  }
  // The block after another one becomes part of it.
  void absorb_next(uint32_t block) {
    const uint32_t next = blocks_[block].after;
    blocks_[block].size += blocks_[next].size;
    blocks_[block].after = blocks_[next].after;
    if (blocks_[next].after != kNone) blocks_[blocks_[next].after].before = block;
    block_at(blocks_[next].start) = 0;
    unused_.push_back(next);
  }
  static constexpr int kMostTries = 8;
  // Any block of a bin above the size's own fits; within its own bin some do.
  template <class Likes>
  uint32_t find(uint32_t size, Likes likes) const {
    int first, second, tries = 0;
    bin_of(size, first, second);
    uint32_t found = kNone;
    for (;;) {
      for (uint32_t b = bins_[first][second]; b != kNone; b = blocks_[b].bin_after) {
        if (blocks_[b].size < size) continue;
        if (likes(blocks_[b].start * granule_bytes_, size * granule_bytes_)) return b;
        if (found == kNone) found = b;
        if (++tries == kMostTries) return found;
      }
      uint32_t row = second + 1 < kSecond ? second_map_[first] & (~0u << (second + 1)) : 0;
      if (row == 0) {
        const uint32_t rows = first + 1 < 32 ? first_map_ & (~0u << (first + 1)) : 0;
        if (rows == 0) return found;
        first = __builtin_ctz(rows);
        row = second_map_[first];
      }
      second = __builtin_ctz(row);
    }
  }
  uint32_t new_block() {
    if (!unused_.empty()) {
      const uint32_t block = unused_.back();
      unused_.pop_back();
      return block;
    }
    blocks_.push_back({});
    return static_cast<uint32_t>(blocks_.size() - 1);
  }
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

}  // namespace ooc
