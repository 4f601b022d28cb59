// Preloaded (LD_PRELOAD): calls of the system and of malloc that come from our own libraries fail, by call site.
//
//   FAULT_MODULES   libraries whose calls count, by file name, separated by colons (libooc_alloc.so)
//   FAULT_RULE      FUNCTION MODULE+0xOFFSET AFTER TIMES DELAY_MS   one rule; the site as FAULT_SITES has it. A delay: the call
//                   succeeds that much later; -1: it moves a part of the bytes (pread, pwrite); else it fails
//   FAULT_SITES     file that gets "FUNCTION MODULE+0xOFFSET COUNT" for each site at exit
//
// A call that libstdc++ makes on behalf of our code (a string's memory) belongs to the line of ours. Nothing here
// allocates.
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <sys/mman.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>
#include <unwind.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <system_error>
#include <thread>
#include <utility>

namespace {

struct Entry {
  std::atomic<const void*> address{nullptr};
  const char* function = nullptr;
  char module[96] = {};
  uint64_t offset = 0;
  bool ours = false;
  std::atomic<uint64_t> calls{0};
};
constexpr size_t kEntries = 1 << 14;
Entry entries[kEntries];
std::atomic_flag busy = ATOMIC_FLAG_INIT;
std::atomic<bool> stopped{false};
thread_local bool inside = false;
thread_local bool comes_short = false;  // the call that is about to be made

char modules[512] = ":libooc_alloc.so:";
char rule_function[64], rule_module[128];
uint64_t rule_offset = 0, rule_after = 0, rule_times = 0;
double rule_delay = 0;
bool has_rule = false;
std::atomic<uint64_t> failed{0};
const char* sites_file = nullptr;
pid_t process = 0;

const char* base_name(const char* path) {
  const char* slash = std::strrchr(path, '/');
  return slash != nullptr ? slash + 1 : path;
}

void describe(Entry& entry, const void* address) {
  Dl_info info{};
  if (dladdr(address, &info) == 0 || info.dli_fname == nullptr) return;
  std::snprintf(entry.module, sizeof entry.module, "%s", base_name(info.dli_fname));
  entry.offset = static_cast<uint64_t>(static_cast<const char*>(address) - static_cast<const char*>(info.dli_fbase));
  char sought[128];
  std::snprintf(sought, sizeof sought, ":%s:", entry.module);
  entry.ours = std::strstr(modules, sought) != nullptr;
}

// The entry of a site; null where there are too many.
Entry* find(const char* function, const void* address) {
  size_t at = (reinterpret_cast<uintptr_t>(address) * 0x9e3779b97f4a7c15u >> 40) % kEntries;
  for (size_t tries = 0; tries < 64; ++tries, at = (at + 1) % kEntries) {
    Entry& entry = entries[at];
    const void* known = entry.address.load(std::memory_order_acquire);
    if (known == address && std::strcmp(entry.function, function) == 0) return &entry;
    if (known != nullptr) continue;
    while (busy.test_and_set()) sched_yield();
    if (entry.address.load() == nullptr) {
      entry.function = function;
      describe(entry, address);
      entry.address.store(address, std::memory_order_release);
    }
    busy.clear();
    if (entry.address.load() == address && std::strcmp(entry.function, function) == 0) return &entry;
  }
  return nullptr;
}

struct Frames {
  const char* function;
  bool skip_first = false;  // the library's own operator new, on behalf of the frame above
  Entry* found = nullptr;
  int depth = 0;
};

// The first frame of ours above the one that calls, no further than a few of libstdc++'s.
_Unwind_Reason_Code look(_Unwind_Context* context, void* data) {
  auto* frames = static_cast<Frames*>(data);
  if (++frames->depth > 9) return _URC_END_OF_STACK;
  const void* address = reinterpret_cast<const void*>(_Unwind_GetIP(context));
  Entry* entry = find(frames->function, address);
  if (entry == nullptr) return _URC_END_OF_STACK;
  if (entry->ours) {
    const bool skip = frames->skip_first && frames->found == nullptr;
    frames->found = entry;
    return skip ? _URC_NO_REASON : _URC_END_OF_STACK;
  }
  const bool passes = std::strncmp(entry->module, "libstdc++", 9) == 0 || std::strstr(entry->module, "fault_interposer") != nullptr;
  return passes ? _URC_NO_REASON : _URC_END_OF_STACK;
}

// Whether this call fails.
bool fails(const char* function, const void* address, bool through_library = false) {
  if (inside || stopped.load(std::memory_order_relaxed) || process == 0) return false;
  inside = true;
  Entry* entry = find(function, address);
  if (entry != nullptr && through_library && (entry->ours || std::strncmp(entry->module, "libstdc++", 9) == 0)) {
    Frames frames{function, entry->ours};
    _Unwind_Backtrace(look, &frames);
    entry = frames.found;
  }
  bool result = false;
  if (entry != nullptr && entry->ours) {
    const uint64_t number = entry->calls.fetch_add(1);
    if (has_rule && entry->offset == rule_offset && std::strcmp(function, rule_function) == 0 &&
        std::strcmp(entry->module, rule_module) == 0 && number >= rule_after && failed.load() < rule_times) {
      failed.fetch_add(1);
      if (rule_delay < 0) {
        comes_short = true;
      } else if (rule_delay > 0) {
        const timespec pause{0, static_cast<long>(rule_delay * 1e6)};
        nanosleep(&pause, nullptr);
      } else {
        result = true;
      }
    }
  }
  inside = false;
  return result;
}

template <typename Function>
Function real_of(const char* name) {
  return reinterpret_cast<Function>(dlsym(RTLD_NEXT, name));
}

void write_sites() {
  if (sites_file == nullptr || getpid() != process) return;
  inside = true;
  std::FILE* out = std::fopen(sites_file, "w");
  if (out == nullptr) return;
  for (const Entry& entry : entries)
    if (entry.ours && entry.calls.load() > 0)
      std::fprintf(out, "%s %s+0x%llx %llu\n", entry.function, entry.module, static_cast<unsigned long long>(entry.offset),
                   static_cast<unsigned long long>(entry.calls.load()));
  std::fclose(out);
}

__attribute__((constructor)) void start() {
  if (const char* names = std::getenv("FAULT_MODULES")) std::snprintf(modules, sizeof modules, ":%s:", names);
  if (const char* rule = std::getenv("FAULT_RULE")) {
    char site[128];
    unsigned long long after = 0, times = 0;
    if (std::sscanf(rule, "%63s %127s %llu %llu %lf", rule_function, site, &after, &times, &rule_delay) != 5) std::abort();
    char* plus = std::strrchr(site, '+');
    if (plus == nullptr) std::abort();
    *plus = '\0';
    std::snprintf(rule_module, sizeof rule_module, "%s", site);
    rule_offset = std::strtoull(plus + 1, nullptr, 16);
    rule_after = after;
    rule_times = times;
    has_rule = true;
  }
  sites_file = std::getenv("FAULT_SITES");
  process = getpid();
}
__attribute__((destructor)) void finish() { write_sites(); }

}  // namespace

extern "C" void fault_interposer_stop() {
  stopped = true;
  write_sites();
}

#define SITE __builtin_return_address(0)
#define INTERPOSED(result, name, parameters, arguments, failure, number)             \
  extern "C" result name parameters {                                                \
    static const auto real = real_of<result(*) parameters>(#name);                      \
    if (!fails(#name, SITE)) return real arguments;                                  \
    errno = number;                                                                  \
    return failure;                                                                  \
  }

INTERPOSED(void*, mmap, (void* a, size_t b, int c, int d, int e, off_t f), (a, b, c, d, e, f), MAP_FAILED, ENOMEM)
INTERPOSED(int, munmap, (void* a, size_t b) noexcept, (a, b), -1, ENOMEM)
INTERPOSED(int, mprotect, (void* a, size_t b, int c) noexcept, (a, b, c), -1, ENOMEM)
INTERPOSED(ssize_t, write, (int a, const void* b, size_t c), (a, b, c), -1, ENOSPC)
INTERPOSED(ssize_t, read, (int a, void* b, size_t c), (a, b, c), -1, EIO)
INTERPOSED(int, fallocate, (int a, int b, off_t c, off_t d), (a, b, c, d), -1, ENOSPC)
INTERPOSED(int, posix_fallocate, (int a, off_t b, off_t c), (a, b, c), ENOSPC, ENOSPC)
INTERPOSED(int, msync, (void* a, size_t b, int c), (a, b, c), -1, EIO)
INTERPOSED(int, sync_file_range, (int a, off_t b, off_t c, unsigned d), (a, b, c, d), -1, EIO)
INTERPOSED(int, posix_fadvise, (int a, off_t b, off_t c, int d) noexcept, (a, b, c, d), EINVAL, EINVAL)
INTERPOSED(int, mkostemp, (char* a, int b), (a, b), -1, EACCES)
INTERPOSED(int, unlink, (const char* a) noexcept, (a), -1, EROFS)
INTERPOSED(int, pipe2, (int* a, int b) noexcept, (a, b), -1, EMFILE)
INTERPOSED(int, posix_memalign, (void** a, size_t b, size_t c) noexcept, (a, b, c), ENOMEM, ENOMEM)
INTERPOSED(void*, dlopen, (const char* a, int b) noexcept, (a, b), nullptr, ENOMEM)

namespace {
size_t part_of(size_t bytes) { return std::exchange(comes_short, false) ? bytes / 8192 * 4096 + 100 : bytes; }
}  // namespace

extern "C" ssize_t pwrite(int file, const void* from, size_t bytes, off_t offset) {
  static const auto real = real_of<ssize_t (*)(int, const void*, size_t, off_t)>("pwrite");
  if (!fails("pwrite", SITE)) return real(file, from, part_of(bytes) / 4096 * 4096, offset);
  errno = ENOSPC;
  return -1;
}

extern "C" ssize_t pread(int file, void* to, size_t bytes, off_t offset) {
  static const auto real = real_of<ssize_t (*)(int, void*, size_t, off_t)>("pread");
  if (!fails("pread", SITE)) return real(file, to, part_of(bytes) / 4096 * 4096, offset);
  errno = EIO;
  return -1;
}

extern "C" int open(const char* path, int flags, ...) {
  va_list more;
  va_start(more, flags);
  const mode_t mode = (flags & (O_CREAT | O_TMPFILE)) != 0 ? va_arg(more, mode_t) : 0;
  va_end(more);
  static const auto real = real_of<int (*)(const char*, int, ...)>("open");
  if (!fails("open", SITE)) return real(path, flags, mode);
  errno = EACCES;
  return -1;
}

extern "C" void* mremap(void* a, size_t b, size_t c, int flags, ...) noexcept {
  va_list more;
  va_start(more, flags);
  void* target = va_arg(more, void*);
  va_end(more);
  static const auto real = real_of<void* (*)(void*, size_t, size_t, int, ...)>("mremap");
  if (!fails("mremap", SITE)) return real(a, b, c, flags, target);
  errno = ENOMEM;
  return MAP_FAILED;
}

// Our libraries' operator new is their own and calls this. The real one is glibc's, as looking it up would allocate.
extern "C" void* __libc_malloc(size_t bytes);
extern "C" void* malloc(size_t bytes) noexcept {
  if (!fails("malloc", SITE, true)) return __libc_malloc(bytes);
  errno = ENOMEM;
  return nullptr;
}

// Threads: by this, not by pthread_create, whose caller is libstdc++.
void std::thread::_M_start_thread(std::unique_ptr<std::thread::_State> state, void (*depend)()) {
  using Start = void (*)(std::thread*, std::unique_ptr<std::thread::_State>, void (*)());
  static const auto real = real_of<Start>("_ZNSt6thread15_M_start_threadESt10unique_ptrINS_6_StateESt14default_deleteIS1_EEPFvvE");
  if (fails("thread", SITE)) throw std::system_error(std::make_error_code(std::errc::resource_unavailable_try_again));
  real(this, std::move(state), depend);
}
