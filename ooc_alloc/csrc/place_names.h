// Places in the user's program, as texts of the integration's, and numbers for them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <unordered_map>

namespace ooc {

class PlaceNames {
 public:
  // Returns 0 if there are too many texts.
  uint32_t id(const char* text) {
    constexpr size_t kMostPlaces = 1 << 16;
    const auto known = ids_.find(text);
    if (known != ids_.end()) return known->second;
    if (texts_.size() >= kMostPlaces) return 0;
    texts_.emplace_back(text);
    return ids_[text] = static_cast<uint32_t>(texts_.size() - 1);
  }
  // Returns null if there is no such place.
  const char* text(uint32_t id) const { return id < texts_.size() ? texts_[id].c_str() : nullptr; }

 private:
  std::deque<std::string> texts_{""};
  std::unordered_map<std::string, uint32_t> ids_{{"", 0}};
};

}  // namespace ooc
