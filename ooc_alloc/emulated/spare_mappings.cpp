#include "spare_mappings.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>

namespace ooc::emulated {
namespace {

constexpr size_t kPages = 32;  // each one mapping, as its neighbours differ in protection

size_t page_bytes() { return static_cast<size_t>(sysconf(_SC_PAGESIZE)); }

}  // namespace

void SpareMappings::take() {
  if (pages_ != nullptr) return;
  void* pages = mmap(nullptr, kPages * page_bytes(), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (pages == MAP_FAILED) return;
  pages_ = pages;
  for (size_t i = 1; i < kPages; i += 2) {
    if (mprotect(static_cast<char*>(pages) + i * page_bytes(), page_bytes(), PROT_READ) == 0) continue;
    release();
    return;
  }
}

bool SpareMappings::release() {
  if (pages_ == nullptr) return false;
  munmap(pages_, kPages * page_bytes());
  pages_ = nullptr;
  return true;
}

}  // namespace ooc::emulated
