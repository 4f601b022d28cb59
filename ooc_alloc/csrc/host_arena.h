// Host memory for swapped data, never beyond the host budget. Blocks come from one of two ranges of addresses: ordinary
// blocks from memory of the system, pinned in large extents and given out in whole pages; mappable ones from physical
// chunks of the driver's, given out in whole chunks, which can be mapped at a variable's own address too. Best fit,
// merged on free.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>

#include "driver.h"
#include "host_chunks.h"

namespace ooc {

// Why there was no memory: what helps differs.
enum class Refusal { kNone, kBudget, kSystem };

// A range of addresses that gets memory from its start on, extent by extent, and the blocks in it.
class HostRange {
 public:
  HostRange(char* base, uint64_t bytes, uint64_t unit) : base_(base), bytes_(bytes), unit_(unit) {}

  // A block of whole units, or null if no hole is large enough.
  char* allocate(uint64_t bytes);
  void free(char* block, uint64_t bytes);
  bool contains(const char* address) const { return address >= base_ && address < base_ + bytes_; }
  // How much memory the range needs so that a block of these bytes fits at its end.
  uint64_t missing(uint64_t bytes) const;
  // The next bytes have memory now.
  char* next() const { return base_ + committed_; }
  void grow(uint64_t bytes);
  // Bytes from an address to the end of its extent. The only method that may be called while another thread allocates.
  uint64_t extent_left(const char* address) const;

  char* base() const { return base_; }
  uint64_t committed() const { return committed_; }
  uint64_t used() const { return used_; }
  uint64_t rounded(uint64_t bytes) const { return (bytes + unit_ - 1) / unit_ * unit_; }
  uint64_t unit() const { return unit_; }

 private:
  void add_hole(uint64_t offset, uint64_t bytes);
  void remove_hole(std::map<uint64_t, uint64_t>::iterator hole);

  char* base_;
  uint64_t bytes_, unit_;
  uint64_t committed_ = 0, used_ = 0;
  std::map<uint64_t, uint64_t> holes_;                    // offset -> bytes
  std::set<std::pair<uint64_t, uint64_t>> holes_by_size_; // (bytes, offset)
  mutable std::mutex extents_mutex_;
  std::map<uint64_t, uint64_t> extents_;                  // offset -> bytes
};

class HostArena {
 public:
  HostArena(const Driver& driver, uint64_t budget_bytes);  // throws std::runtime_error
  ~HostArena();
  HostArena(const HostArena&) = delete;
  HostArena& operator=(const HostArena&) = delete;

  // Makes allocate_mappable() possible. Throws std::runtime_error if the driver has no such memory.
  void prepare_mappable(CUdevice device, uint64_t chunk_bytes);
  // Null if the budget (or the system) has no such block left.
  char* allocate(uint64_t bytes) { return allocate_in(pages_, bytes); }
  char* allocate_mappable(uint64_t bytes) { return allocate_in(*mappable_, bytes); }
  void free(char* block, uint64_t bytes) { range_of(block).free(block, bytes); }

  // Whether a block can be mapped at another address, and the chunks that it lies in.
  bool is_mappable(const char* block) const { return mappable_ && mappable_->contains(block); }
  const HostChunks& chunks() const { return *chunks_; }

  Refusal refusal() const { return refusal_; }        // of the last allocation
  // For an error: how much there is, and what would give more.
  std::string describe() const;

  uint64_t budget() const { return budget_; }
  // Taken from the system.
  uint64_t committed() const { return pages_.committed() + (mappable_ ? mappable_->committed() : 0); }
  uint64_t used() const { return pages_.used() + (mappable_ ? mappable_->used() : 0); }
  uint64_t unpinned() const { return unpinned_; }     // extents that the driver would not pin: slower, not wrong

  // How much a block takes.
  uint64_t taken(const char* block, uint64_t bytes) const { return range_of(block).rounded(bytes); }
  // Bytes from an address to the end of its extent: a single copy must not cross from one pinned extent into the next.
  // It may be called while another thread allocates.
  uint64_t extent_left(const char* address) const { return range_of(address).extent_left(address); }

  static constexpr uint64_t kPage = 4096;

 private:
  HostRange& range_of(const char* block) { return is_mappable(block) ? *mappable_ : pages_; }
  const HostRange& range_of(const char* block) const { return is_mappable(block) ? *mappable_ : pages_; }
  char* allocate_in(HostRange& range, uint64_t bytes);
  bool grow(HostRange& range, uint64_t bytes);
  bool commit(const HostRange& range, uint64_t bytes);

  // What is taken at a time: so much, and of a small budget a part, as the two ranges share it.
  static constexpr uint64_t kExtent = uint64_t{64} << 20, kExtents = 16;

  const Driver& driver_;
  uint64_t budget_;
  HostRange pages_;
  std::unique_ptr<HostChunks> chunks_;
  std::unique_ptr<HostRange> mappable_;
  Refusal refusal_ = Refusal::kNone;
  uint64_t unpinned_ = 0;
  std::map<char*, uint64_t> pinned_;  // extents that the driver pinned
};

}  // namespace ooc
