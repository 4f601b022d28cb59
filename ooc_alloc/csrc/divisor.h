// Division by a size fixed at run time. Sizes of chunks and granules are powers of two nearly always, and a 64-bit
// division costs as much as everything else in a look-up does.
#pragma once

#include <cstdint>

namespace ooc {

class Divisor {
 public:
  explicit Divisor(uint64_t value = 1)
      : value_(value), shift_((value & (value - 1)) == 0 ? __builtin_ctzll(value) : -1) {}

  uint64_t operator()(uint64_t dividend) const { return shift_ >= 0 ? dividend >> shift_ : dividend / value_; }

 private:
  uint64_t value_;  // at least 1
  int shift_;       // log2(value_), or -1
};

}  // namespace ooc
