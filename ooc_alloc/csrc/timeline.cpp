#include "timeline.h"

#include <dlfcn.h>

#include <algorithm>

namespace ooc {

void Timeline::start(uint64_t capacity) {
  constexpr uint64_t kLeast = 64, kMost = uint64_t{1} << 24;
  uint64_t size = kLeast;
  while (size < std::min(capacity, kMost)) size *= 2;
  std::vector<ooc_event> fresh(size);  // written once, so that its pages are there
  events_ = std::move(fresh);
  mask_ = size - 1;
  first_ = next_;
  on_.store(true, std::memory_order_relaxed);
}

uint32_t Timeline::read(uint64_t* from, ooc_event* events, uint32_t count) const {
  *from = std::min(std::max(*from, oldest()), next_);
  const auto found = static_cast<uint32_t>(std::min<uint64_t>(count, next_ - *from));
  for (uint32_t i = 0; i < found; ++i) events[i] = events_[(*from + i) & mask_];
  return found;
}

bool Ranges::load(const char* library, std::string& reason) {
  if (on()) return true;
  void* handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);  // never closed: its functions may be called at any time
  if (handle == nullptr) {
    reason = dlerror();
    return false;
  }
  push_ = reinterpret_cast<int (*)(const char*)>(dlsym(handle, "nvtxRangePushA"));
  pop_ = reinterpret_cast<int (*)()>(dlsym(handle, "nvtxRangePop"));
  if (push_ == nullptr || pop_ == nullptr) {
    reason = std::string(library) + " has no nvtxRangePushA or no nvtxRangePop";
    return false;
  }
  on_.store(true, std::memory_order_release);
  return true;
}

}  // namespace ooc
