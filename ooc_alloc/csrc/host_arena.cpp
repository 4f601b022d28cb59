#include "host_arena.h"

#include <sys/mman.h>

#include <algorithm>
#include <iterator>
#include <stdexcept>
#include <string>

namespace ooc {
namespace {

uint64_t whole_pages(uint64_t bytes) { return (bytes + HostArena::kPage - 1) / HostArena::kPage * HostArena::kPage; }

char* reserve(uint64_t bytes) {
  void* range = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (range == MAP_FAILED)
    throw std::runtime_error("no address space for " + std::to_string(bytes) +
                             " bytes of host memory (mmap failed); lower OOC_HOST_BUDGET");
  return static_cast<char*>(range);
}

}  // namespace

// ---- HostRange ------------------------------------------------------------------------------------------------------

char* HostRange::allocate(uint64_t bytes) {
  bytes = rounded(bytes);
  const auto fit = holes_by_size_.lower_bound({bytes, 0});
  if (fit == holes_by_size_.end()) return nullptr;
  const uint64_t offset = fit->second, size = fit->first;
  remove_hole(holes_.find(offset));
  if (size > bytes) add_hole(offset + bytes, size - bytes);
  used_ += bytes;
  return base_ + offset;
}

void HostRange::free(char* block, uint64_t bytes) {
  bytes = rounded(bytes);
  used_ -= bytes;
  add_hole(static_cast<uint64_t>(block - base_), bytes);
}

uint64_t HostRange::missing(uint64_t bytes) const {
  // Free bytes at the end of what is committed: the next extent continues them.
  const bool ends_free = !holes_.empty() && holes_.rbegin()->first + holes_.rbegin()->second == committed_;
  return rounded(bytes) - (ends_free ? holes_.rbegin()->second : 0);
}

void HostRange::grow(uint64_t bytes) {
  const uint64_t offset = committed_;
  {
    const std::lock_guard<std::mutex> lock(extents_mutex_);
    extents_[offset] = bytes;
  }
  committed_ += bytes;
  add_hole(offset, bytes);
}

uint64_t HostRange::extent_left(const char* address) const {
  const auto offset = static_cast<uint64_t>(address - base_);
  const std::lock_guard<std::mutex> lock(extents_mutex_);
  const auto extent = std::prev(extents_.upper_bound(offset));
  return extent->first + extent->second - offset;
}

void HostRange::add_hole(uint64_t offset, uint64_t bytes) {
  auto next = holes_.lower_bound(offset);
  if (next != holes_.end() && offset + bytes == next->first) {
    bytes += next->second;
    auto merged = next++;
    remove_hole(merged);
  }
  if (next != holes_.begin()) {
    auto before = std::prev(next);
    if (before->first + before->second == offset) {
      offset = before->first;
      bytes += before->second;
      remove_hole(before);
    }
  }
  holes_[offset] = bytes;
  holes_by_size_.insert({bytes, offset});
}

void HostRange::remove_hole(std::map<uint64_t, uint64_t>::iterator hole) {
  holes_by_size_.erase({hole->second, hole->first});
  holes_.erase(hole);
}

// ---- HostArena ------------------------------------------------------------------------------------------------------

HostArena::HostArena(const Driver& driver, uint64_t budget_bytes)
    : driver_(driver), budget_(whole_pages(budget_bytes)), pages_(reserve(budget_), budget_, kPage) {}

HostArena::~HostArena() {
  for (const auto& [start, bytes] : pinned_) driver_.cuMemHostUnregister(start);
  munmap(pages_.base(), budget_);
}

void HostArena::prepare_mappable(CUdevice device, uint64_t chunk_bytes) {
  if (mappable_) return;
  auto chunks = std::make_unique<HostChunks>(driver_, device, budget_, chunk_bytes);
  mappable_ = std::make_unique<HostRange>(chunks->base(), budget_ / chunk_bytes * chunk_bytes, chunk_bytes);
  chunks_ = std::move(chunks);
}

// Memory behind the next bytes of the range.
bool HostArena::commit(const HostRange& range, uint64_t bytes) {
  if (&range != &pages_) return chunks_->extend(bytes);
  if (mprotect(range.next(), bytes, PROT_READ | PROT_WRITE) != 0) return false;
  if (driver_.counted(Counted::kHostRegister, driver_.cuMemHostRegister(range.next(), bytes, 0)) == CUDA_SUCCESS)
    pinned_[range.next()] = bytes;
  else unpinned_ += bytes;
  return true;
}

bool HostArena::grow(HostRange& range, uint64_t bytes) {
  const uint64_t missing = range.missing(bytes);
  const uint64_t left = (budget_ - std::min(budget_, committed())) / range.unit() * range.unit();
  refusal_ = Refusal::kBudget;
  if (missing > left) return false;
  const uint64_t extent = std::min(left, range.rounded(std::max(std::min(kExtent, budget_ / kExtents), missing)));
  refusal_ = Refusal::kSystem;
  if (!commit(range, extent)) return false;
  range.grow(extent);
  return true;
}

char* HostArena::allocate_in(HostRange& range, uint64_t bytes) {
  char* block = range.allocate(bytes);
  if (block == nullptr) {
    if (!grow(range, bytes)) return nullptr;
    block = range.allocate(bytes);
  }
  refusal_ = Refusal::kNone;
  return block;
}

std::string HostArena::describe() const {
  const std::string in_use = std::to_string(used()), budget = std::to_string(budget_);
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

}  // namespace ooc
