// How much memory this process may still take: what the host has available, or what its cgroups leave of it.
#include <algorithm>
#include <fstream>
#include <limits>
#include <string>

#include "config.h"

namespace ooc::emulated {
namespace {

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

}  // namespace

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

}  // namespace ooc::emulated
