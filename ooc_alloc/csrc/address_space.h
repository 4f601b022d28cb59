// Virtual address ranges, in chunks, carved from one reservation: lowest fit, neighbours merge on free.
// A range has no memory behind it; giving ranges out never calls the driver.
#pragma once

#include <cstdint>
#include <map>

namespace ooc {

class AddressSpace {
 public:
  explicit AddressSpace(uint64_t chunks) { holes_[0] = chunks; }

  static constexpr uint64_t kNone = ~uint64_t{0};

  // First chunk of a range, or kNone.
  uint64_t take(uint64_t count) {
    for (auto hole = holes_.begin(); hole != holes_.end(); ++hole) {
      if (hole->second < count) continue;
      const uint64_t first = hole->first, rest = hole->second - count;
      holes_.erase(hole);
      if (rest > 0) holes_[first + count] = rest;
      return first;
    }
    return kNone;
  }

  void give(uint64_t first, uint64_t count) {
    auto next = holes_.lower_bound(first);
    if (next != holes_.end() && first + count == next->first) {
      count += next->second;
      next = holes_.erase(next);
    }
    if (next != holes_.begin()) {
      auto before = std::prev(next);
      if (before->first + before->second == first) {
        before->second += count;
        return;
      }
    }
    holes_[first] = count;
  }

 private:
  std::map<uint64_t, uint64_t> holes_;  // first chunk -> count
};

}  // namespace ooc
