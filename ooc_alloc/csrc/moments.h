// Points in the work of streams; see stream_order.h.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace ooc {

struct Moment {
  uint32_t stream = 0;
  uint64_t number = 0;  // 0: nothing to wait for
};

// What has to be over before memory serves its next user: at most one moment a stream.
class Moments {
 public:
  Moments() = default;
  Moments(Moment moment) { add(moment); }  // a moment is also a set of one
  void add(Moment moment) {
    if (moment.number == 0) return;
    for (Moment& known : moments_)
      if (known.stream == moment.stream) {
        known.number = std::max(known.number, moment.number);
        return;
      }
    moments_.push_back(moment);
  }
  void add(const Moments& others) {
    for (const Moment& moment : others) add(moment);
  }
  void clear() { moments_.clear(); }
  bool empty() const { return moments_.empty(); }
  std::vector<Moment>::const_iterator begin() const { return moments_.begin(); }
  std::vector<Moment>::const_iterator end() const { return moments_.end(); }

  // over(moment) says which moments need not be waited for any more.
  template <class Over>
  void forget(Over over) {
    moments_.erase(std::remove_if(moments_.begin(), moments_.end(), over), moments_.end());
  }

 private:
  std::vector<Moment> moments_;
};

}  // namespace ooc
