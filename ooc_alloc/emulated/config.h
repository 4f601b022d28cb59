// What the emulated device is like, and how the environment says so.
//
//   OOC_EMULATED_MEMORY       device size: 8GiB, 1.5GB, 65536 (bytes); default 80% of the host memory that this process
//                             may still take, at most 64 GiB
//   OOC_EMULATED_GRANULARITY  64KiB (default), 2MiB as on hardware; a power of two, at least a page
//   OOC_EMULATED_BANDWIDTH    10GiB/s for both directions, or a list: h2d=8GiB/s,d2h=6GiB/s,latency=20us; also
//                             h2d_latency=, d2h_latency=; unlimited (default) is as fast as memcpy
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "quantities.h"

namespace ooc::emulated {

struct LinkConfig {
  double bytes_per_second = 0;  // 0: as fast as memcpy
  double latency_seconds = 0;
};

struct Config {
  uint64_t memory_bytes = 0;
  uint64_t granularity_bytes = 64 << 10;
  LinkConfig h2d, d2h;
};

// Reads the three variables above. Returns false and sets `error` to what is wrong and the valid form.
bool read_environment(Config& config, std::string& error);

// Whether such a device can be made. The limits are the same for the environment and for the control interface.
bool validate(const Config& config, std::string& error);

constexpr Unit kTimeUnits[] = {{"ns", 1e-9}, {"us", 1e-6}, {"ms", 1e-3}, {"s", 1}};

// Parts of the grammars, also used by the fault rules; the others are in quantities.h.
bool parse_integer(std::string_view text, uint64_t& value);
bool parse_bandwidth(std::string_view text, Config& config);  // the value of OOC_EMULATED_BANDWIDTH
std::vector<std::string_view> split(std::string_view text, char separator);

}  // namespace ooc::emulated
