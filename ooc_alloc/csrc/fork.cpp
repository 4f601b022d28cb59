// Threads that exit and processes that fork.
//
// Device memory does not survive a fork: on a GPU the child may not use it, and the emulated device's pages are shared,
// so the parent's next swap would change what the child reads. So the child of a process with an emulated device gets
// private copies of everything that was on the device or swapped out, and from then on allocates plain host memory; the
// parent waits until the copies are made. Costs the child at most the live bytes, the parent the time to copy them.
// Where swapped data are on a disk, live bytes may be more than memory: the copies are made in a file of the child's own
// there, which the system reads as the child touches them.
#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <new>
#include <string_view>
#include <unordered_map>

#include "core.h"
#include "last_error.h"
#include "own_memory.h"

namespace ooc {
namespace {

// Leaked on purpose: threads may exit, and processes fork, after static objects are gone.
std::mutex& registry_mutex() {
  static auto* mutex = new std::mutex;
  return *mutex;
}
std::unordered_map<uint64_t, Core*>& registry() {
  static auto* cores = new std::unordered_map<uint64_t, Core*>;
  return *cores;
}

struct ThreadEntries {
  std::vector<ThreadEntry> entries;
  ~ThreadEntries() {
    std::lock_guard<std::mutex> lock(registry_mutex());
    for (const ThreadEntry& entry : entries) {
      const auto core = registry().find(entry.core_id);
      if (core != registry().end()) core->second->thread_exits(entry.state);
    }
  }
};
thread_local ThreadEntries thread_entries;

int fork_pipe[2] = {-1, -1};

void prepare() {
  registry_mutex().lock();
  if (!registry().empty()) {
    if (pipe2(fork_pipe, O_CLOEXEC) != 0) fork_pipe[0] = fork_pipe[1] = -1;
    for (auto& [id, core] : registry()) core->before_fork();
  }
  own_memory::before_fork();
}

void close_end(int end) {
  if (fork_pipe[end] >= 0) close(fork_pipe[end]);
  fork_pipe[end] = -1;
}

void parent() {
  own_memory::after_fork();
  if (!registry().empty()) {
    close_end(1);
    char byte;
    while (fork_pipe[0] >= 0 && read(fork_pipe[0], &byte, 1) < 0 && errno == EINTR) {
    }  // end of file: the child has its copies, or is gone
    close_end(0);
    for (auto& [id, core] : registry()) core->after_fork(false);
  }
  registry_mutex().unlock();
}

void child() {
  own_memory::after_fork();
  if (!registry().empty()) {
    close_end(0);
    for (auto& [id, core] : registry()) core->after_fork(true);
    close_end(1);
  }
  registry_mutex().unlock();
}

}  // namespace

uint64_t new_core_id() {
  static std::atomic<uint64_t> next{1};
  return next++;
}

void register_core(uint64_t id, Core* core) {
  static const int registered = pthread_atfork(prepare, parent, child);
  (void)registered;
  std::lock_guard<std::mutex> lock(registry_mutex());
  registry()[id] = core;
}

void unregister_core(uint64_t id) {
  std::lock_guard<std::mutex> lock(registry_mutex());
  registry().erase(id);
}

void add_thread_entry(const ThreadEntry& entry) { thread_entries.entries.push_back(entry); }

const ThreadEntry* find_thread_entry(uint64_t core_id) {
  for (const ThreadEntry& entry : thread_entries.entries)
    if (entry.core_id == core_id) return &entry;
  return nullptr;
}

void Core::thread_exits(ThreadState* thread) {
  const Lock lock(mutex_);
  if (!detached_) {
    holds_.release(thread->held);
    if (thread->in_function) threads_.ends();  // others wait for it to end
  }
  watch_.close_function(*thread);
  threads_.exits(thread);
  iterations_.thread_exits(thread);
  changed_.notify_all();
}

void Core::before_fork() {
  Lock lock(mutex_);
  paused_ |= kForks;
  if (device_.host_accessible() && !detached_) {  // the child copies what is there; of a lost device, as far as it has come
    while ((transitions_.moving() > 0 || host_.shifting()) && !device_lost(lock)) wait_a_while(lock);
    (void)streams_.host_waits_for_all();
  }
  host_.before_fork();
  lock.release();  // held until after_fork
}

namespace {

// Private memory in place of a range, filled but not yet moved there.
struct Replacement {
  char* address;
  char* fresh;
  uint64_t bytes;
};

// Without a lock or an allocation.
[[noreturn]] void die(std::string_view message) {
  (void)!write(STDERR_FILENO, message.data(), message.size());
  abort();
}

// A copy in a file of its own, at the address of memory that the system fills when it is touched.
class CopyInFile {
 public:
  // Throws std::runtime_error.
  CopyInFile(const DiskFile& source, uint64_t bytes) : file_(source.folder().c_str(), bytes, false) {}

  bool begin(uint64_t bytes) {
    start_ = end_;
    end_ += bytes;
    return file_.reserve(start_, bytes);
  }
  // The next bytes of the copy are at `offset` of what was begun.
  bool put(const char* from, uint64_t bytes, uint64_t offset) { return file_.write(from, bytes, start_ + offset) == 0; }
  bool put(DiskFile& from, uint64_t at, uint64_t bytes, uint64_t offset) {
    if (buffer_.bytes < bytes) buffer_ = Pages(bytes);
    return buffer_.start != nullptr && from.read(buffer_.start, bytes, at) == 0 && put(buffer_.start, bytes, offset);
  }
  char* end() { return file_.private_view(end_ - start_, start_); }

 private:
  struct Pages {
    char* start = nullptr;
    uint64_t bytes = 0;

    Pages() = default;
    explicit Pages(uint64_t wanted) : bytes(wanted) {
      void* pages = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      if (pages != MAP_FAILED) start = static_cast<char*>(pages);
    }
    ~Pages() {
      if (start != nullptr) munmap(start, bytes);
    }
    Pages(const Pages&) = delete;
    Pages& operator=(Pages&& other) noexcept {
      std::swap(start, other.start);
      std::swap(bytes, other.bytes);
      return *this;
    }
  };
  DiskFile file_;
  Pages buffer_;
  uint64_t start_ = 0, end_ = 0;
};

// There is no way back, and no way on without the bytes at their address.
void put_in_place(const Replacement& r) {
  if (mremap(r.fresh, r.bytes, r.bytes, MREMAP_MAYMOVE | MREMAP_FIXED, r.address) != MAP_FAILED) return;
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED;
  if (mmap(r.address, r.bytes, PROT_READ | PROT_WRITE, flags, -1, 0) == MAP_FAILED)
    die("ooc_alloc: the system does not move private memory to where variables are (mremap, mmap)\n");
  std::memcpy(r.address, r.fresh, r.bytes);
  munmap(r.fresh, r.bytes);
}

}  // namespace

// The same for a variable of which copies are on a disk. Null if it cannot be made.
static char* copy_in_file(CopyInFile& copy, const Geometry& geometry, const HostCopies& host, const Region& region) {
  bool complete = copy.begin(region.count * geometry.chunk_bytes);
  for (uint32_t i = 0; complete && i < region.count; ++i) {
    const Slot& slot = region.slots[i];
    if (slot.blank() || (!slot.resident() && !slot.host_valid)) continue;
    const uint64_t bytes = DiskFile::whole_pages(geometry.bytes_in(&region, i, 1)), offset = i * geometry.chunk_bytes;
    if (slot.resident()) complete = copy.put(geometry.address(&region, i), bytes, offset);
    else if (host.in_memory(&region)) complete = copy.put(host.address(&region, i), bytes, offset);
    else complete = copy.put(*host.file(), host.file_offset(&region, i), bytes, offset);
  }
  return complete ? copy.end() : nullptr;
}

// First all copies, then all moves: nothing is changed unless every copy could be made.
bool Core::make_private(bool release_chunks) try {
  std::vector<Replacement> replacements;
  std::unique_ptr<CopyInFile> in_file;
  if (host_.file() != nullptr) in_file = std::make_unique<CopyInFile>(*host_.file(), table_.live_bytes() + slabs_.used() * geometry_.chunk_bytes);
  auto add = [&](char* address, uint64_t bytes) {
    void* fresh = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (fresh == MAP_FAILED) return false;
    replacements.push_back({address, static_cast<char*>(fresh), bytes});
    return true;
  };
  bool complete = true;
  for (const Region& region : table_.all()) {
    if (!region.live || !complete) continue;
    if (in_file) {
      char* fresh = copy_in_file(*in_file, geometry_, host_, region);
      complete = fresh != nullptr;
      if (complete) replacements.push_back({geometry_.address(&region), fresh, region.count * geometry_.chunk_bytes});
      continue;
    }
    complete = add(geometry_.address(&region), region.count * geometry_.chunk_bytes);
    for (uint32_t i = 0; complete && i < region.count; ++i) {
      const Slot& slot = region.slots[i];
      if (slot.blank() || (!slot.resident() && region.host == nullptr)) continue;
      const char* source = slot.resident() ? geometry_.address(&region, i) : host_.address(&region, i);
      std::memcpy(replacements.back().fresh + i * geometry_.chunk_bytes, source, geometry_.bytes_in(&region, i, 1));
    }
  }
  slabs_.each_used_chunk([&](char* address) {
    complete = complete && add(address, geometry_.chunk_bytes);
    if (complete) std::memcpy(replacements.back().fresh, address, geometry_.chunk_bytes);
  });
  if (!complete) {
    for (const Replacement& r : replacements) munmap(r.fresh, r.bytes);
    return false;
  }
  if (release_chunks) release_everything();
  for (const Replacement& r : replacements) put_in_place(r);
  return true;
} catch (const std::runtime_error&) {
  return false;  // no file could be made
}

// The driver gets back every chunk; bookkeeping of live variables stays, so that they can be freed.
void Core::release_everything() {
  for (Region& region : table_.all()) {
    if (!region.live) continue;
    host_.hide(Piece::whole(&region));
    for (uint32_t i = 0; i < region.count; ++i)
      if (const Piece slot{&region, i, 1}; region.slots[i].resident() && !mappings_.unmap(slot)) mappings_.forget(slot);
  }
  idle_.reclaim_all();
  slabs_.release_all();
  pool_.release_free();
}

int Core::detach() {
  // Addresses that streams still use are mapped twice, and unmapped later.
  if (!device_.host_accessible() || streams_.on())
    return fail(OOC_INVALID, "memory of this device cannot become host memory; free it instead");
  before_fork();
  host_.after_fork(false);
  Lock lock(mutex_, std::adopt_lock);
  paused_ &= ~kForks;
  if (detached_) return OOC_OK;
  if (threads_.active() > 0) return fail(OOC_INVALID, "a function is running");
  if (device_.lost() && !host_.disk_idle()) return fail(OOC_DRIVER_FAILURE, device_.describe_loss());
  if (device_.lost()) transitions_.abandon_device(lock);  // nothing may write behind the addresses any more
  if (!make_private(true)) return fail(OOC_OUT_OF_MEMORY, "not enough host memory to hold what is on the device");
  detached_ = true;
  paused_ = kDetached;
  changed_.notify_all();
  return OOC_OK;
}

void Core::after_fork(bool in_child) {
  Lock lock(mutex_, std::adopt_lock);
  paused_ &= ~kForks;
  host_.after_fork(in_child);
  if (!in_child) {
    changed_.notify_all();
    return;
  }
  new (&changed_) std::condition_variable;  // any other use of it would wait for threads that only the parent has
  forked_ = true;
  if (detached_) return;
  detached_ = true;
  paused_ = kDetached;
  timeline_.stop();  // without a look at threads that only the parent has
  // On a GPU the driver itself refuses to work in the child. Without memory for the copies the child must not go on.
  if (device_.host_accessible() && !make_private(false))
    die("ooc_alloc: no memory for the forked child's copy of the device memory\n");
}

}  // namespace ooc
