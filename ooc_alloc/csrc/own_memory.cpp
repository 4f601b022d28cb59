#include "own_memory.h"

#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <new>

namespace ooc::own_memory {
namespace {

constexpr size_t kSegmentBytes = size_t{1} << 20;  // far more than one operation takes
constexpr size_t kAlignment = 16;                  // that malloc gives
constexpr int kSegments = 64;                      // a segment is used again when all that was taken from it is freed

struct Segment {
  char* start = nullptr;
  size_t used = 0;
  uint64_t live = 0;  // blocks
};
Segment segments[kSegments];
int current = 0;
std::atomic<bool> ever_used{false};
std::mutex mutex;
using Guard = std::lock_guard<std::mutex>;

size_t rounded(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

}  // namespace

bool refill() noexcept {
  const Guard guard(mutex);
  for (int i = 0; i < kSegments; ++i) {
    Segment& segment = segments[i];
    if (segment.live > 0) continue;
    if (segment.start == nullptr) {
      const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE;
      void* memory = mmap(nullptr, kSegmentBytes, PROT_READ | PROT_WRITE, flags, -1, 0);
      if (memory == MAP_FAILED) return false;
      segment.start = static_cast<char*>(memory);
    }
    segment.used = 0;
    current = i;
    whole.store(true, std::memory_order_relaxed);
    return true;
  }
  return false;
}

[[gnu::cold, maybe_unused]] static void* take(size_t bytes, size_t alignment) noexcept {
  const Guard guard(mutex);
  Segment& segment = segments[current];
  const size_t offset = rounded(segment.used, alignment);
  bytes = rounded(bytes, kAlignment);
  if (segment.start == nullptr || offset > kSegmentBytes || bytes > kSegmentBytes - offset) return nullptr;
  void* block = segment.start + offset;
  segment.used = offset + bytes;
  ++segment.live;
  whole.store(false, std::memory_order_relaxed);
  ever_used.store(true, std::memory_order_release);
  return block;
}

[[gnu::cold, maybe_unused]] static bool give(void* block) noexcept {
  const Guard guard(mutex);
  for (Segment& segment : segments) {
    const auto offset = static_cast<size_t>(static_cast<char*>(block) - segment.start);
    if (segment.start == nullptr || offset >= kSegmentBytes) continue;
    --segment.live;
    return true;
  }
  return false;
}

void before_fork() noexcept { mutex.lock(); }
void after_fork() noexcept { mutex.unlock(); }

[[maybe_unused]] static void* allocate(size_t bytes) noexcept {
  void* block = std::malloc(bytes > 0 ? bytes : 1);
  return __builtin_expect(block != nullptr, true) ? block : take(bytes, kAlignment);
}

// For what begins at a line of the cache.
[[maybe_unused]] static void* allocate(size_t bytes, size_t alignment) noexcept {
  void* block = std::aligned_alloc(alignment, rounded(bytes, alignment));
  return block != nullptr ? block : take(bytes, alignment);
}

[[maybe_unused]] static void release(void* block) noexcept {
  if (__builtin_expect(ever_used.load(std::memory_order_acquire), false) && give(block)) return;
  std::free(block);
}

}  // namespace ooc::own_memory

// Sanitizers have operators of their own.
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
void* operator new(size_t bytes) {
  if (void* block = ooc::own_memory::allocate(bytes)) return block;
  throw std::bad_alloc();
}
void* operator new(size_t bytes, const std::nothrow_t&) noexcept { return ooc::own_memory::allocate(bytes); }
void* operator new(size_t bytes, std::align_val_t alignment) {
  if (void* block = ooc::own_memory::allocate(bytes, static_cast<size_t>(alignment))) return block;
  throw std::bad_alloc();
}
void operator delete(void* block, std::align_val_t) noexcept { ooc::own_memory::release(block); }
void operator delete(void* block, size_t, std::align_val_t) noexcept { ooc::own_memory::release(block); }
void operator delete(void* block) noexcept { ooc::own_memory::release(block); }
void operator delete(void* block, size_t) noexcept { ooc::own_memory::release(block); }
#endif
