#include "sites.h"

#include <dlfcn.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

#include "device.h"

namespace ooc::emulated {
Site site_of(const void* address) {
  Dl_info info{};
  if (dladdr(address, &info) == 0 || info.dli_fname == nullptr) return {"unknown", reinterpret_cast<uint64_t>(address)};
  const std::string_view path = info.dli_fname;
  const auto offset = static_cast<uint64_t>(static_cast<const char*>(address) - static_cast<const char*>(info.dli_fbase));
  return {std::string(path.substr(path.rfind('/') + 1)), offset};
}

bool parse_site(std::string_view text, Site& site) {
  const size_t plus = text.rfind("+0x");
  if (plus == 0 || plus == std::string_view::npos) return false;
  const std::string digits(text.substr(plus + 3));
  char* end = nullptr;
  site.module = std::string(text.substr(0, plus));
  site.offset = std::strtoull(digits.c_str(), &end, 16);
  return !digits.empty() && *end == '\0';
}

void Sites::watch(const char* path) {
  static std::string file;
  static pid_t process;
  if (!file.empty()) return;
  file = path;
  process = getpid();
  watch();
  std::atexit([] {
    if (getpid() != process) return;  // in a forked child the counts are the parent's
    std::FILE* out = std::fopen(file.c_str(), "w");
    const std::string text = Device::get().sites.list();
    if (out == nullptr || std::fputs(text.c_str(), out) < 0)
      std::fprintf(stderr, "emulated CUDA driver: cannot write OOC_EMULATED_SITES='%s'\n", file.c_str());
    if (out != nullptr) std::fclose(out);
  });
}

void Sites::add(Call call, const void* return_address) {
  const std::lock_guard<std::mutex> lock(mutex);
  ++counts_[{call, return_address}];
}

std::string Sites::list() {
  const std::lock_guard<std::mutex> lock(mutex);
  std::string text;
  for (const auto& [key, count] : counts_) {
    const Site site = site_of(key.second);
    char line[512];
    std::snprintf(line, sizeof line, "%s %s+0x%llx %llu\n", name_of(key.first), site.module.c_str(),
                  static_cast<unsigned long long>(site.offset), static_cast<unsigned long long>(count));
    text += line;
  }
  return text;
}

}  // namespace ooc::emulated
