// Host memory for swapped data, never beyond the host budget. Blocks come from one of two ranges of addresses: ordinary
// blocks from memory of the system, pinned in large extents and given out in whole pages; mappable ones from physical
// chunks of the driver's, given out in whole chunks, which can be mapped at a variable's own address too. Best fit,
// merged on free.
//
// Over a file the ordinary blocks have no memory: their addresses, less the first one, are offsets in the file, which
// keeps room for them. What belongs together lies together there, too.
//
// The core's lock guards all of it, but for what says that it is called without.
#pragma once

#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>

#include "disk_file.h"
#include "driver.h"
#include "free_extents.h"
#include "host_chunks.h"

namespace ooc {

// Why there was no memory: what helps differs.
enum class Refusal { kNone, kBudget, kSystem };

// A range of addresses that gets memory from its start on, extent by extent, and the blocks in it.
class HostRange {
 public:
  HostRange(char* base, uint64_t bytes, uint64_t unit) : base_(base), bytes_(bytes), unit_(unit) {}

  // A block of whole units, or null if no hole is large enough.
  char* allocate(uint64_t bytes) {
    const uint64_t offset = holes_.take_smallest(rounded(bytes));
    if (offset == FreeExtents::kNone) return nullptr;
    used_ += rounded(bytes);
    return base_ + offset;
  }
  void free(char* block, uint64_t bytes) {
    used_ -= rounded(bytes);
    holes_.give(static_cast<uint64_t>(block - base_), rounded(bytes));
  }
  bool contains(const char* address) const { return address >= base_ && address < base_ + bytes_; }
  // How much memory the range needs so that a block of these bytes fits at its end, where some may be free.
  uint64_t missing(uint64_t bytes) const { return rounded(bytes) - holes_.free_before(committed_); }
  // The next bytes have memory now.
  char* next() const { return base_ + committed_; }
  void grow(uint64_t bytes) {
    const uint64_t offset = committed_;
    {
      const std::lock_guard<std::mutex> lock(extents_mutex_);
      extents_[offset] = bytes;
    }
    committed_ += bytes;
    holes_.give(offset, bytes);
  }
  // Bytes from an address to the end of its extent. The only method that may be called while another thread allocates.
  uint64_t extent_left(const char* address) const {
    const auto offset = static_cast<uint64_t>(address - base_);
    const std::lock_guard<std::mutex> lock(extents_mutex_);
    const auto extent = std::prev(extents_.upper_bound(offset));
    return extent->first + extent->second - offset;
  }

  char* base() const { return base_; }
  uint64_t committed() const { return committed_; }
  uint64_t used() const { return used_; }
  uint64_t rounded(uint64_t bytes) const { return (bytes + unit_ - 1) / unit_ * unit_; }
  uint64_t unit() const { return unit_; }

 private:
  char* base_;
  uint64_t bytes_, unit_;
  uint64_t committed_ = 0, used_ = 0;
  FreeExtents holes_;
  mutable std::mutex extents_mutex_;
  std::map<uint64_t, uint64_t> extents_;  // offset -> bytes
};

class HostArena {
 public:
  // Over a file if it is not null. Throws std::runtime_error.
  HostArena(const Driver& driver, CUdevice device, uint64_t budget_bytes, DiskFile* file = nullptr)
      : driver_(driver),
        file_(file),
        budget_((budget_bytes + kPage - 1) / kPage * kPage),
        pages_(reserve(budget_), budget_, kPage) {
    if (file_ == nullptr) prefer_node(host_node(driver, device));
  }
  ~HostArena() {
    adopt();
    for (const auto& [start, bytes] : pinned_) driver_.cuMemHostUnregister(start);
    munmap(pages_.base(), budget_);
  }

  // Makes allocate_mappable() possible. Throws std::runtime_error if the driver has no such memory.
  void prepare_mappable(CUdevice device, uint64_t chunk_bytes) {
    if (mappable_) return;
    auto chunks = std::make_unique<HostChunks>(driver_, device, budget_, chunk_bytes);
    const std::lock_guard<std::mutex> lock(growth_);
    mappable_ = std::make_unique<HostRange>(chunks->base(), budget_ / chunk_bytes * chunk_bytes, chunk_bytes);
    chunks_ = std::move(chunks);
  }
  // Null if the budget (or the system) has no such block left.
  char* allocate(uint64_t bytes) { return allocate_in(pages_, bytes); }
  char* allocate_mappable(uint64_t bytes) { return allocate_in(*mappable_, bytes); }
  void free(char* block, uint64_t bytes) { range_of(block).free(block, bytes); }

  // Little is left of what the system gave, and there may be more.
  bool runs_low() const {
    const uint64_t committed = pages_.committed();
    return committed > 0 && !mappable_ && committed - pages_.used() < extent() / 2 && left() >= extent() &&
           refusal_ != Refusal::kSystem;
  }
  // Takes and pins the next extent, which lasts, for the next allocation that needs one. Called without the lock.
  void grow_ahead() {
    const std::lock_guard<std::mutex> lock(growth_);
    if (ahead_.bytes == 0 && left() >= extent()) ahead_ = commit_pages(extent());  // others may have taken it since
  }
  // What grow_ahead() took belongs to the arena now.
  void adopt() {
    const std::lock_guard<std::mutex> lock(growth_);
    adopt_ahead();
  }

  // Whether a block can be mapped at another address, and the chunks that it lies in.
  bool is_mappable(const char* block) const { return mappable_ && mappable_->contains(block); }
  const HostChunks& chunks() const { return *chunks_; }

  Refusal refusal() const { return refusal_; }        // of the last allocation
  // For an error: how much there is, and what would give more.
  std::string describe() const {
    const std::string in_use = std::to_string(used()), budget = std::to_string(budget_);
    if (file_ != nullptr) return describe_file(in_use, budget);
    switch (refusal_) {
      case Refusal::kBudget:
        return "host memory for swapped data is limited to " + budget + " bytes (" + in_use +
               " in use); raise OOC_HOST_BUDGET";
      case Refusal::kSystem:
        return "the system has no more host memory for swapped data (" + in_use +
               " bytes in use, OOC_HOST_BUDGET allows " + budget + "); end other programs, or run where there is more memory";
      default:
        return "host memory for swapped data is not the reason (" + in_use + " of " + budget + " bytes in use)";
    }
  }

  uint64_t budget() const { return budget_; }
  // Taken from the system.
  uint64_t committed() const { return pages_.committed() + (mappable_ ? mappable_->committed() : 0); }
  uint64_t used() const { return pages_.used() + (mappable_ ? mappable_->used() : 0); }
  uint64_t unpinned() const { return unpinned_; }     // extents that the driver would not pin: slower, not wrong

  // Of a block over a file.
  uint64_t file_offset(const char* block) const { return static_cast<uint64_t>(block - pages_.base()); }
  // How much a block takes.
  uint64_t taken(const char* block, uint64_t bytes) const { return range_of(block).rounded(bytes); }
  // Bytes from an address to the end of its extent: a single copy must not cross from one pinned extent into the next.
  // It may be called while another thread allocates.
  uint64_t extent_left(const char* address) const { return range_of(address).extent_left(address); }

  static constexpr uint64_t kPage = 4096;

 private:
  struct Extent {
    uint64_t bytes = 0;
    bool pinned = false;
  };
  static char* reserve(uint64_t bytes) {
    void* range = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (range == MAP_FAILED)
      throw std::runtime_error("no address space for " + std::to_string(bytes) +
                               " bytes of host memory (mmap failed); lower OOC_HOST_BUDGET");
    return static_cast<char*>(range);
  }
  HostRange& range_of(const char* block) { return is_mappable(block) ? *mappable_ : pages_; }
  const HostRange& range_of(const char* block) const { return is_mappable(block) ? *mappable_ : pages_; }
  char* allocate_in(HostRange& range, uint64_t bytes) {
    char* block = range.allocate(bytes);
    if (block == nullptr) {
      const std::lock_guard<std::mutex> lock(growth_);
      if (adopt_ahead()) block = range.allocate(bytes);
      if (block == nullptr) {
        if (!grow(range, bytes)) return nullptr;
        block = range.allocate(bytes);
      }
    }
    refusal_ = Refusal::kNone;
    return block;
  }
  bool grow(HostRange& range, uint64_t bytes) {
    const uint64_t missing = range.missing(bytes);
    const uint64_t most = left() / range.unit() * range.unit();
    refusal_ = Refusal::kBudget;
    if (missing > most) return false;
    const uint64_t taken = std::min(most, range.rounded(std::max(extent(), missing)));
    refusal_ = Refusal::kSystem;
    if (&range != &pages_) {
      if (!chunks_->extend(taken)) return false;
      range.grow(taken);
      return true;
    }
    ahead_ = commit_pages(taken);
    return adopt_ahead();
  }
  // Memory behind the next bytes of the ordinary range; none if the system has no more.
  Extent commit_pages(uint64_t bytes) const {
    char* start = pages_.next();
    if (file_ != nullptr) return file_->reserve(file_offset(start), bytes) ? Extent{bytes, false} : Extent{};
    if (mprotect(start, bytes, PROT_READ | PROT_WRITE) != 0) return {};
    const bool pinned = driver_.counted(Counted::kHostRegister, driver_.cuMemHostRegister(start, bytes, 0)) == CUDA_SUCCESS;
    return {bytes, pinned};
  }
  bool adopt_ahead() {
    const Extent extent = std::exchange(ahead_, {});
    if (extent.bytes == 0) return false;
    if (extent.pinned) pinned_[pages_.next()] = extent.bytes;
    else if (file_ == nullptr) unpinned_ += extent.bytes;
    pages_.grow(extent.bytes);
    return true;
  }
  std::string describe_file(const std::string& in_use, const std::string& budget) const {
    switch (refusal_) {
      case Refusal::kBudget:
        return "disk space for swapped data is limited to " + budget + " bytes (" + in_use + " in use); raise OOC_DISK_BUDGET";
      case Refusal::kSystem:
        return file_->last_failure() + " (" + in_use + " bytes in use, OOC_DISK_BUDGET allows " + budget +
               "); make room in OOC_DISK=" + file_->folder();
      default:
        return "disk space for swapped data is not the reason (" + in_use + " of " + budget + " bytes in use)";
    }
  }
  // Where the system has no nodes, or refuses, memory is slower, not wrong.
  void prefer_node(int node) const {
    unsigned long nodes[16] = {};
    constexpr int kBits = 8 * sizeof(unsigned long), kMost = 16 * kBits;
    if (node < 0 || node >= kMost) return;
    nodes[node / kBits] = 1ul << (node % kBits);
    (void)!syscall(SYS_mbind, pages_.base(), budget_, MPOL_PREFERRED, nodes, kMost + 1, 0);
  }

  // What is taken at a time: so much, and of a small budget a part, as the two ranges share it.
  static constexpr uint64_t kExtent = uint64_t{64} << 20, kExtents = 16;
  uint64_t left() const { return budget_ - std::min(budget_, committed()); }
  uint64_t extent() const { return pages_.rounded(std::min(kExtent, budget_ / kExtents)); }

  const Driver& driver_;
  DiskFile* file_;
  uint64_t budget_;
  HostRange pages_;
  std::unique_ptr<HostChunks> chunks_;
  std::unique_ptr<HostRange> mappable_;
  Refusal refusal_ = Refusal::kNone;
  uint64_t unpinned_ = 0;
  std::map<char*, uint64_t> pinned_;  // extents that the driver pinned
  std::mutex growth_;                 // nobody else takes more from the system; after the core's lock, or without it
  Extent ahead_;                      // the next one, guarded by growth_
};

}  // namespace ooc
