// Which extents of a range are free: of addresses, of a file, in whatever unit its owner counts. Neighbours merge when
// they are given back. Nothing is behind an extent here: to take one never calls the driver or the system.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <map>
#include <set>
#include <utility>

namespace ooc {

class FreeExtents {
 public:
  FreeExtents() = default;
  FreeExtents(uint64_t start, uint64_t size) { give(start, size); }

  static constexpr uint64_t kNone = ~uint64_t{0};

  // The start of an extent, or kNone: of the smallest free one that fits, the lowest of these; or the lowest that fits.
  uint64_t take_smallest(uint64_t size) {
    const auto found = by_size_.lower_bound({size, 0});
    return found != by_size_.end() ? cut(by_start_.find(found->second), size) : kNone;
  }
  uint64_t take_lowest(uint64_t size) {
    auto found = by_start_.begin();
    while (found != by_start_.end() && found->second < size) ++found;
    return found != by_start_.end() ? cut(found, size) : kNone;
  }

  // The start and the size of an extent: of the smallest that fits, or else the whole of the largest; (kNone, 0) if none is free.
  std::pair<uint64_t, uint64_t> take_up_to(uint64_t size) {
    if (by_size_.empty()) return {kNone, 0};
    const uint64_t least = std::min(size, by_size_.rbegin()->first);
    return {take_smallest(least), least};
  }

  void give(uint64_t start, uint64_t size) {
    auto next = by_start_.lower_bound(start);
    if (next != by_start_.end() && start + size == next->first) {
      size += next->second;
      next = remove(next);
    }
    if (next != by_start_.begin()) {
      const auto before = std::prev(next);
      if (before->first + before->second == start) {
        start = before->first;
        size += before->second;
        remove(before);
      }
    }
    by_start_[start] = size;
    by_size_.insert({size, start});
  }

  // The size of the free extent that starts there; 0 if none does. take_at() takes its first part, at most all of it.
  uint64_t free_from(uint64_t start) const {
    const auto found = by_start_.find(start);
    return found != by_start_.end() ? found->second : 0;
  }
  void take_at(uint64_t start, uint64_t size) { cut(by_start_.find(start), size); }

  // How much is free just before an end.
  uint64_t free_before(uint64_t end) const {
    const auto next = by_start_.lower_bound(end);
    if (next == by_start_.begin()) return 0;
    const auto& [start, size] = *std::prev(next);
    return start + size == end ? size : 0;
  }

 private:
  using ByStart = std::map<uint64_t, uint64_t>;  // start -> size; no two are neighbours

  ByStart::iterator remove(ByStart::iterator extent) {
    by_size_.erase({extent->second, extent->first});
    return by_start_.erase(extent);
  }
  uint64_t cut(ByStart::iterator extent, uint64_t size) {
    const auto [start, all] = *extent;
    remove(extent);
    if (all > size) give(start + size, all - size);
    return start;
  }

  ByStart by_start_;
  std::set<std::pair<uint64_t, uint64_t>> by_size_;  // (size, start) of the same extents
};

}  // namespace ooc
