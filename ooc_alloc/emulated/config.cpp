#include "config.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <limits>

namespace ooc::emulated {
namespace {

constexpr uint64_t kLargestDefaultMemory = 64ull << 30;
constexpr uint64_t kLargestMemory = 1ull << 42;
constexpr double kSlowestLink = 1024;  // bytes per second; a lower rate must be a typing mistake

// "10GiB/s", "unlimited"
bool parse_rate(std::string_view text, double& bytes_per_second) {
  text = trim(text);
  if (lower(text) == "unlimited") {
    bytes_per_second = 0;
    return true;
  }
  if (text.size() < 3 || text.substr(text.size() - 2) != "/s") return false;
  text.remove_suffix(2);
  return parse_quantity(text, kByteUnits, bytes_per_second) && bytes_per_second >= kSlowestLink;
}

std::string wrong(const char* name, const char* value, const char* form) {
  return std::string(name) + "='" + value + "' is not valid: use " + form;
}

// ---- how much memory this process may still take: what the host has available, or what its cgroups leave of it ------

constexpr uint64_t kNoLimit = std::numeric_limits<uint64_t>::max();

// The number in a file; `otherwise` where there is no file, or no number in it ("max").
uint64_t read_number(const std::string& path, uint64_t otherwise) {
  std::ifstream file(path);
  uint64_t value = 0;
  return file >> value ? value : otherwise;
}

uint64_t read_available() {
  std::ifstream file("/proc/meminfo");
  for (std::string name, unit; file >> name;) {
    uint64_t kilobytes = 0;
    if (name == "MemAvailable:" && file >> kilobytes) return kilobytes << 10;
    std::getline(file, unit);
  }
  return kNoLimit;
}

// Walks from the process's group to the root: each level may limit. `files` are those of cgroup version 1 or 2.
uint64_t room_below(const std::string& mount, std::string group, const char* limit_file, const char* usage_file) {
  uint64_t room = kNoLimit;
  for (;;) {
    const std::string folder = mount + group + "/";
    const uint64_t limit = read_number(folder + limit_file, kNoLimit);
    const uint64_t usage = read_number(folder + usage_file, 0);
    if (limit != kNoLimit) room = std::min(room, limit > usage ? limit - usage : 0);
    const size_t slash = group.rfind('/');
    if (slash == std::string::npos || group.empty()) return room;
    group.resize(slash);
  }
}

uint64_t available_host_bytes() {
  uint64_t available = read_available();
  std::ifstream file("/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {  // "0::/group" or "4:memory:/group"
    const size_t first = line.find(':');
    const size_t second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const std::string group = line.substr(second + 1);
    if (controllers.empty()) {
      available = std::min(available, room_below("/sys/fs/cgroup", group, "memory.max", "memory.current"));
    } else if (controllers == "memory") {
      available = std::min(available, room_below("/sys/fs/cgroup/memory", group, "memory.limit_in_bytes",
                                                 "memory.usage_in_bytes"));
    }
  }
  return available == kNoLimit ? 1ull << 30 : available;
}

}  // namespace

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  for (size_t begin = 0;;) {
    const size_t end = text.find(separator, begin);
    parts.push_back(trim(text.substr(begin, end - begin)));
    if (end == std::string_view::npos) return parts;
    begin = end + 1;
  }
}

bool parse_integer(std::string_view text, uint64_t& value) {
  value = 0;
  if (text.empty() || text.size() > 18) return false;
  for (const char letter : text) {
    if (letter < '0' || letter > '9') return false;
    value = value * 10 + static_cast<uint64_t>(letter - '0');
  }
  return true;
}

bool parse_bandwidth(std::string_view text, Config& config) {
  LinkConfig h2d, d2h;
  for (const std::string_view part : split(text, ',')) {
    const size_t equals = part.find('=');
    const std::string_view key = equals == std::string_view::npos ? "" : trim(part.substr(0, equals));
    const std::string_view value = equals == std::string_view::npos ? part : part.substr(equals + 1);
    double number = 0;
    const bool is_latency = key == "latency" || key == "h2d_latency" || key == "d2h_latency";
    if (is_latency ? !parse_quantity(value, kTimeUnits, number) : !parse_rate(value, number)) return false;
    if (equals == std::string_view::npos) {
      h2d.bytes_per_second = d2h.bytes_per_second = number;
    } else if (key == "h2d") {
      h2d.bytes_per_second = number;
    } else if (key == "d2h") {
      d2h.bytes_per_second = number;
    } else if (is_latency) {
      if (key != "d2h_latency") h2d.latency_seconds = number;
      if (key != "h2d_latency") d2h.latency_seconds = number;
    } else {
      return false;
    }
  }
  config.h2d = h2d;
  config.d2h = d2h;
  return true;
}

bool read_environment(Config& config, std::string& error) {
  const char* memory = std::getenv("OOC_EMULATED_MEMORY");
  const char* granularity = std::getenv("OOC_EMULATED_GRANULARITY");
  const char* bandwidth = std::getenv("OOC_EMULATED_BANDWIDTH");
  if (granularity != nullptr && *granularity != '\0' && !parse_bytes(granularity, config.granularity_bytes)) {
    error = wrong("OOC_EMULATED_GRANULARITY", granularity, "a power of two of at least a page, such as 64KiB or 2MiB");
    return false;
  }
  if (bandwidth != nullptr && *bandwidth != '\0' && !parse_bandwidth(bandwidth, config)) {
    error = wrong("OOC_EMULATED_BANDWIDTH", bandwidth,
                  "10GiB/s, or a list such as h2d=8GiB/s,d2h=6GiB/s,latency=20us (keys h2d, d2h, latency, h2d_latency, "
                  "d2h_latency; at least 1KiB/s), or unlimited");
    return false;
  }
  if (memory != nullptr && *memory != '\0') {
    if (!parse_bytes(memory, config.memory_bytes)) {
      error = wrong("OOC_EMULATED_MEMORY", memory, "a number of bytes, such as 8GiB, 512MiB or 4000000000");
      return false;
    }
  } else {
    config.memory_bytes = std::min(available_host_bytes() / 10 * 8, kLargestDefaultMemory);
  }
  if (config.granularity_bytes != 0) config.memory_bytes -= config.memory_bytes % config.granularity_bytes;
  return validate(config, error);
}

bool validate(const Config& config, std::string& error) {
  const uint64_t page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  const uint64_t granularity = config.granularity_bytes;
  if (granularity < page || (granularity & (granularity - 1)) != 0 || granularity > (1ull << 30)) {
    error = "OOC_EMULATED_GRANULARITY is " + std::to_string(granularity) +
            " bytes: it must be a power of two from one page (" + std::to_string(page) + ") to 1GiB";
    return false;
  }
  if (config.memory_bytes < granularity || config.memory_bytes > kLargestMemory ||
      config.memory_bytes % granularity != 0) {
    error = "OOC_EMULATED_MEMORY is " + std::to_string(config.memory_bytes) + " bytes: it must be a multiple of the " +
            std::to_string(granularity) + " bytes of OOC_EMULATED_GRANULARITY, and at most 4TiB";
    return false;
  }
  for (const LinkConfig* link : {&config.h2d, &config.d2h}) {
    const bool rate_is_valid = link->bytes_per_second == 0 || link->bytes_per_second >= kSlowestLink;
    if (rate_is_valid && link->latency_seconds >= 0 && link->latency_seconds <= 10) continue;
    error = "OOC_EMULATED_BANDWIDTH: a bandwidth is at least 1KiB/s (0: unlimited), a latency from 0 to 10s";
    return false;
  }
  return true;
}

}  // namespace ooc::emulated
