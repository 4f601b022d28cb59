// Host memory for swapped data: one reserved address range, taken from the system and pinned in large extents, given out
// in exact sizes rounded to pages, best fit, merged on free, never beyond the host budget.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <utility>

#include "driver.h"
#include "host_chunks.h"

namespace ooc {

// Why there was no memory: what helps differs.
enum class Refusal { kNone, kBudget, kSystem };

class HostArena {
 public:
  // `chunks`: memory comes from there, and blocks are whole chunks; null: from the system, pinned, blocks are whole pages.
  HostArena(const Driver& driver, uint64_t budget_bytes, HostChunks* chunks = nullptr);
  ~HostArena();
  HostArena(const HostArena&) = delete;
  HostArena& operator=(const HostArena&) = delete;

  // Null if the budget (or the system) has no such block left.
  char* allocate(uint64_t bytes);
  void free(char* block, uint64_t bytes);
  Refusal refusal() const { return refusal_; }        // of the last allocation
  // For an error: how much there is, with `used_bytes` in use in all arenas, and what would give more.
  std::string describe(uint64_t used_bytes) const;

  // The two of them take no more from the system than the budget of this one.
  void share_budget(const HostArena* other) { other_ = other; }

  uint64_t budget() const { return budget_; }
  uint64_t committed() const { return committed_; }   // taken from the system
  uint64_t used() const { return used_; }
  uint64_t unpinned() const { return unpinned_; }     // extents that the driver would not pin: slower, not wrong

  // Bytes from an address to the end of its extent: a single copy must not cross from one pinned range into the next.
  // The only method that may be called while another thread allocates.
  uint64_t extent_left(const char* address) const;

  static constexpr uint64_t kPage = 4096;
  uint64_t rounded(uint64_t bytes) const { return (bytes + unit_ - 1) / unit_ * unit_; }

 private:
  bool grow(uint64_t bytes);
  void add_hole(uint64_t offset, uint64_t bytes);
  void remove_hole(std::map<uint64_t, uint64_t>::iterator hole);

  // What is taken at a time: so much, and of a small budget a part, as another arena may share it.
  static constexpr uint64_t kExtent = uint64_t{64} << 20, kExtents = 16;

  bool take(char* start, uint64_t extent, bool& pinned);

  const Driver& driver_;
  HostChunks* chunks_;
  uint64_t unit_;
  uint64_t budget_;
  const HostArena* other_ = nullptr;
  char* base_ = nullptr;
  Refusal refusal_ = Refusal::kNone;
  uint64_t committed_ = 0, used_ = 0, unpinned_ = 0;
  std::map<uint64_t, uint64_t> holes_;                    // offset -> bytes
  std::set<std::pair<uint64_t, uint64_t>> holes_by_size_; // (bytes, offset)
  mutable std::mutex extents_mutex_;
  std::map<uint64_t, std::pair<uint64_t, bool>> extents_;  // offset -> (bytes, pinned)
};

}  // namespace ooc
