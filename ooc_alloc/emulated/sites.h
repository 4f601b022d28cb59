// Call sites: the places in the program's libraries that driver calls are made from, each known by its return address as
// "libooc_alloc.so+0x1a2b4". With debugging information, `addr2line -e libooc_alloc.so 0x1a2b3` (one byte less: within the
// call) names the line.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>

#include "calls.h"

namespace ooc::emulated {

struct Site {
  std::string module;  // file name without its folder
  uint64_t offset = 0;

  bool operator==(const Site&) const = default;
};

Site site_of(const void* return_address);

bool parse_site(std::string_view text, Site& site);

// Counts calls by site, once somebody has asked for it.
class Sites {
 public:
  void watch() { on_.store(true, std::memory_order_relaxed); }
  // Counts from now on, and writes the list to a file when the process exits.
  void watch(const char* path);
  void count(Call call, const void* return_address) {
    if (__builtin_expect(on_.load(std::memory_order_relaxed), false)) add(call, return_address);
  }
  // One line for each: "cuMemMap libooc_alloc.so+0x1a2b4 17".
  std::string list();

  std::mutex mutex;  // public for the fork handlers; guards the counts

 private:
  void add(Call call, const void* return_address);

  std::atomic<bool> on_{false};
  std::map<std::pair<Call, const void*>, uint64_t> counts_;
};

}  // namespace ooc::emulated
