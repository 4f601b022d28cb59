#include "host_arena.h"

#include <sys/mman.h>

#include <algorithm>
#include <iterator>
#include <stdexcept>
#include <string>

namespace ooc {

HostArena::HostArena(const Driver& driver, uint64_t budget_bytes, HostChunks* chunks)
    : driver_(driver),
      chunks_(chunks),
      unit_(chunks != nullptr ? chunks->chunk_bytes() : kPage),
      budget_(chunks != nullptr ? budget_bytes / unit_ * unit_ : rounded(budget_bytes)) {
  if (chunks != nullptr) {
    base_ = chunks->base();
    return;
  }
  void* range = mmap(nullptr, budget_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (range == MAP_FAILED)
    throw std::runtime_error("no address space for " + std::to_string(budget_) +
                             " bytes of host memory (mmap failed); lower OOC_HOST_BUDGET");
  base_ = static_cast<char*>(range);
}

HostArena::~HostArena() {
  for (const auto& [offset, extent] : extents_)
    if (extent.second) driver_.cuMemHostUnregister(base_ + offset);
  if (base_ != nullptr && chunks_ == nullptr) munmap(base_, budget_);
}

// Memory behind the next bytes of the range.
bool HostArena::take(char* start, uint64_t extent, bool& pinned) {
  pinned = false;
  if (chunks_ != nullptr) return chunks_->extend(extent);
  if (mprotect(start, extent, PROT_READ | PROT_WRITE) != 0) return false;
  pinned = driver_.counted(Counted::kHostRegister, driver_.cuMemHostRegister(start, extent, 0)) == CUDA_SUCCESS;
  if (!pinned) unpinned_ += extent;
  return true;
}

bool HostArena::grow(uint64_t bytes) {
  const uint64_t tail = !holes_.empty() && holes_.rbegin()->first + holes_.rbegin()->second == committed_
                            ? holes_.rbegin()->second
                            : 0;  // free bytes at the end of what is committed: the new extent continues them
  const uint64_t taken = committed_ + (other_ != nullptr ? other_->committed_ : 0);
  const uint64_t left = (budget_ - std::min(budget_, taken)) / unit_ * unit_;
  refusal_ = base_ == nullptr ? Refusal::kSystem : Refusal::kBudget;
  if (base_ == nullptr || bytes > left + tail) return false;
  const uint64_t extent = std::min(left, rounded(std::max(std::min(kExtent, budget_ / kExtents), bytes - tail)));
  bool pinned = false;
  refusal_ = Refusal::kSystem;
  if (!take(base_ + committed_, extent, pinned)) return false;
  {
    const std::lock_guard<std::mutex> lock(extents_mutex_);
    extents_[committed_] = {extent, pinned};
  }
  const uint64_t offset = committed_;
  committed_ += extent;
  add_hole(offset, extent);
  return true;
}

uint64_t HostArena::extent_left(const char* address) const {
  const auto offset = static_cast<uint64_t>(address - base_);
  const std::lock_guard<std::mutex> lock(extents_mutex_);
  const auto extent = std::prev(extents_.upper_bound(offset));
  return extent->first + extent->second.first - offset;
}

void HostArena::add_hole(uint64_t offset, uint64_t bytes) {
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

void HostArena::remove_hole(std::map<uint64_t, uint64_t>::iterator hole) {
  holes_by_size_.erase({hole->second, hole->first});
  holes_.erase(hole);
}

char* HostArena::allocate(uint64_t bytes) {
  bytes = rounded(bytes);
  auto fit = holes_by_size_.lower_bound({bytes, 0});
  if (fit == holes_by_size_.end()) {
    if (!grow(bytes)) return nullptr;
    fit = holes_by_size_.lower_bound({bytes, 0});
  }
  refusal_ = Refusal::kNone;
  const uint64_t offset = fit->second, size = fit->first;
  remove_hole(holes_.find(offset));
  if (size > bytes) add_hole(offset + bytes, size - bytes);
  used_ += bytes;
  return base_ + offset;
}

void HostArena::free(char* block, uint64_t bytes) {
  bytes = rounded(bytes);
  used_ -= bytes;
  add_hole(static_cast<uint64_t>(block - base_), bytes);
}

std::string HostArena::describe(uint64_t used_bytes) const {
  const std::string used = std::to_string(used_bytes), budget = std::to_string(budget_);
  switch (refusal_) {
    case Refusal::kBudget:
      return "host memory for swapped data is limited to " + budget + " bytes (" + used + " in use); raise OOC_HOST_BUDGET";
    case Refusal::kSystem:
      return "the system has no more host memory for swapped data (" + used + " bytes in use, OOC_HOST_BUDGET allows " +
             budget + "); end other programs, or run where there is more memory";
    default:
      return "host memory for swapped data is not the reason (" + used + " of " + budget + " bytes in use)";
  }
}

}  // namespace ooc
