// Failures on request. A fault rule makes chosen calls of one driver function fail before they do anything.
//
//   rules := rule { ';' rule }
//   rule  := function [ ':' key '=' value { ',' key '=' value } ]
//
//   function      a driver function without `_v2`, such as cuMemCreate
//   after=N       the first N calls pass (default 0)
//   every=N       then every Nth call fails (default 1: each)
//   probability=P each of these fails with probability P instead of always; the choice depends on the seed and on the
//                 number of the call alone, so a run can be repeated
//   seed=N        (default 0)
//   times=N       no more than N failures (default: no limit)
//   error=E       the result, as a number or as CUDA_ERROR_... (default 999, CUDA_ERROR_UNKNOWN)
//
//   cuMemCreate:after=10,times=2,error=2;cuMemcpyDtoHAsync:every=50;cuMemMap:probability=0.01,seed=7
//
// Calls are counted from when a rule is added. The first rule that applies to a call decides.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "calls.h"

namespace ooc::emulated {

struct FaultRule {
  Call call{};
  uint64_t after = 0;
  uint64_t every = 1;
  uint64_t times = UINT64_MAX;
  double probability = 1;
  uint64_t seed = 0;
  CUresult error = CUDA_ERROR_UNKNOWN;

  uint64_t calls = 0;     // seen since the rule was added
  uint64_t failures = 0;  // of them
};

// Appends to `rules`; on an error changes nothing and sets `error`.
bool parse_faults(std::string_view text, std::vector<FaultRule>& rules, std::string& error);

class Faults {
 public:
  bool add(std::string_view rules, std::string& error);
  void clear();

  // The failure to return from this call, or CUDA_SUCCESS.
  CUresult check(Call call) {
    return any_.load(std::memory_order_relaxed) ? check_rules(call) : CUDA_SUCCESS;
  }

  uint64_t injected() const { return injected_.load(std::memory_order_relaxed); }
  void reset_stats() { injected_.store(0, std::memory_order_relaxed); }

  std::mutex mutex;  // public for the fork handlers; guards the rules

 private:
  CUresult check_rules(Call call);

  std::vector<FaultRule> rules_;
  std::atomic<bool> any_{false};
  std::atomic<uint64_t> injected_{0};
};

}  // namespace ooc::emulated
