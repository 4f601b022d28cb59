// Failures on request, and costs. A fault rule makes chosen calls of one driver function fail before they do anything, come
// late, or take time.
//
//   rules := rule { ';' rule }
//   rule  := function [ ':' key '=' value { ',' key '=' value } ] | 'published'
//
//   function      a driver function without `_v2`, such as cuMemCreate
//   after=N       the first N calls pass (default 0)
//   every=N       then every Nth call fails (default 1: each)
//   probability=P each of these fails with probability P instead of always; the choice depends on the seed and on the
//                 number of the call alone, so a run can be repeated
//   seed=N        (default 0)
//   times=N       no more than N failures (default: no limit)
//   error=E       the result, as a number or as CUDA_ERROR_... (default 999, CUDA_ERROR_UNKNOWN)
//   site=S        only calls from this place, such as libooc_alloc.so+0x1a2b4 (see sites.h; OOC_EMULATED_SITES=FILE lists them)
//   delay=T       the call, or the work that it enqueues, takes the time T (such as 20ms) longer; it fails only if error= is
//                 given too. With T = `never`, for calls that enqueue work, the work is never done
//
//   cost=T        the call succeeds or fails as it does, and keeps its thread for the time T. It holds no lock meanwhile
//   chunk_cost=T  and for each chunk (mapping) that a cuMemMap, cuMemUnmap, cuMemSetAccess, cuMemCreate or cuMemRelease covers
//   mib_cost=T    and for each MiB that one of these, cuMemHostAlloc or cuMemHostRegister covers
//   published     the costs that were published for chunks of 2 MiB on an A100 (kPublished in faults.cpp)
//
//   cuMemCreate:after=10,times=2,error=2;cuMemcpyDtoHAsync:every=50;cuMemMap:probability=0.01,seed=7
//
// Calls are counted from when a rule is added. The first rule that applies to a call decides; costs add up.
#pragma once

#include <atomic>
#include <cstdint>
#include <limits>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "sites.h"

namespace ooc::emulated {

constexpr double kNever = std::numeric_limits<double>::infinity();

struct CallCost {
  double seconds = 0, chunk_seconds = 0, mib_seconds = 0;  // of the call, of each chunk and of each MiB that it covers
  bool any() const { return seconds + chunk_seconds + mib_seconds > 0; }
};

struct FaultRule {
  Call call{};
  uint64_t after = 0;
  uint64_t every = 1;
  uint64_t times = UINT64_MAX;
  double probability = 1;
  uint64_t seed = 0;
  CUresult error = CUDA_ERROR_UNKNOWN;
  Site site;                 // no module: anywhere
  double delay_seconds = 0;  // kNever: for ever
  CallCost cost;             // if any, the rule does nothing else

  uint64_t calls = 0;     // seen since the rule was added
  uint64_t failures = 0;  // of them
};

// Parses `text` and appends to `rules`. If the text is wrong, it returns false, sets `error` and changes nothing.
bool parse_faults(std::string_view text, std::vector<FaultRule>& rules, std::string& error);

class Faults {
 public:
  bool add(std::string_view rules, std::string& error);
  void clear();

  // Returns the failure to return from this call, or CUDA_SUCCESS. If the call is to come late, this sleeps, or leaves the
  // delay of the work for take_delay().
  CUresult check(Call call, const void* return_address) {
    return any_.load(std::memory_order_relaxed) ? check_rules(call, return_address) : CUDA_SUCCESS;
  }
  // Returns by how much the work that this thread is about to enqueue is to come late, and sets that back to 0.
  static double take_delay();

  // The call that this thread is in covers so much, for its cost.
  static void covers(uint64_t chunks, uint64_t bytes);
  // Within a driver's call, declared before it takes a lock: the call's cost passes at the end.
  struct Cost {
    Cost() = default;
    Cost(const Cost&) = delete;
    Cost& operator=(const Cost&) = delete;
    ~Cost();
  };

  uint64_t injected() const { return injected_.load(std::memory_order_relaxed); }
  void reset_stats() { injected_.store(0, std::memory_order_relaxed); }

  std::mutex mutex;  // public for the fork handlers; guards the rules

 private:
  CUresult check_rules(Call call, const void* return_address);

  std::vector<FaultRule> rules_;
  std::atomic<bool> any_{false};
  std::atomic<uint64_t> injected_{0};
};

}  // namespace ooc::emulated
