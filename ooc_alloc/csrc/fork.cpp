// Threads that exit and processes that fork.
//
// Device memory does not survive a fork: on a GPU the child may not use it, and the emulated device's pages are shared,
// so the parent's next swap would change what the child reads. So the child of a process with an emulated device gets
// private copies of everything that was on the device or swapped out, and from then on allocates plain host memory; the
// parent waits until the copies are made. Costs the child at most the live bytes, the parent the time to copy them.
#include "fork.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <unordered_map>

#include "core.h"

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

struct ThreadEntry {
  uint64_t core_id;
  ThreadState* state;
};
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
  if (registry().empty()) return;
  if (pipe2(fork_pipe, O_CLOEXEC) != 0) fork_pipe[0] = fork_pipe[1] = -1;
  for (auto& [id, core] : registry()) core->before_fork();
}

void close_end(int end) {
  if (fork_pipe[end] >= 0) close(fork_pipe[end]);
  fork_pipe[end] = -1;
}

void parent() {
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
  if (!registry().empty()) {
    close_end(0);
    for (auto& [id, core] : registry()) core->after_fork(true);
    close_end(1);
  }
  registry_mutex().unlock();
}

}  // namespace

uint64_t register_core(Core* core) {
  static uint64_t next = 1;
  static const int registered = pthread_atfork(prepare, parent, child);
  (void)registered;
  std::lock_guard<std::mutex> lock(registry_mutex());
  registry()[next] = core;
  return next++;
}

void unregister_core(Core* core) {
  std::lock_guard<std::mutex> lock(registry_mutex());
  for (auto entry = registry().begin(); entry != registry().end(); ++entry)
    if (entry->second == core) {
      registry().erase(entry);
      return;
    }
}

ThreadState* Core::find_thread_state() const {
  for (const ThreadEntry& entry : thread_entries.entries)
    if (entry.core_id == core_id_) return entry.state;
  return nullptr;
}

ThreadState& Core::thread_state() {
  if (ThreadState* state = find_thread_state()) return *state;
  Lock lock(mutex_);
  auto free = std::find_if(thread_states_.begin(), thread_states_.end(), [](const ThreadState& s) { return s.exited; });
  if (free == thread_states_.end()) {
    thread_states_.emplace_back();
    free = std::prev(thread_states_.end());
  }
  *free = ThreadState{};
  thread_entries.entries.push_back({core_id_, &*free});
  return *free;
}

void Core::thread_exits(ThreadState* thread) {
  Lock lock(mutex_);
  if (!detached_) release_held(thread->held);
  thread->exited = true;
  if (sequence_thread_ == thread) sequence_thread_ = nullptr;
  changed_.notify_all();
}

void Core::before_fork() {
  Lock lock(mutex_);
  paused_ = true;
  while (!detached_ && moving_ > 0) wait_a_while(lock);
  lock.release();  // held until after_fork
}

namespace {

// Replaces [address, +bytes) by private memory with the given filler's content.
template <class Fill>
bool replace_with_private(char* address, uint64_t bytes, Fill fill) {
  void* fresh = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (fresh == MAP_FAILED) return false;
  fill(static_cast<char*>(fresh));
  return mremap(fresh, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, address) != MAP_FAILED;
}

}  // namespace

void Core::after_fork(bool in_child) {
  Lock lock(mutex_, std::adopt_lock);
  paused_ = false;
  if (!in_child || detached_) {
    changed_.notify_all();
    return;
  }
  detached_ = true;
  if (!device_.host_accessible()) return;  // the driver itself refuses to work in the child
  for (const Region& region : regions_) {
    if (!region.live) continue;
    char* address = address_of(region.first);
    replace_with_private(address, region.count * chunk_bytes_, [&](char* fresh) {
      for (uint32_t i = 0; i < region.count; ++i) {
        const uint64_t offset = i * chunk_bytes_;
        const uint64_t bytes = std::min(region.bytes - std::min(region.bytes, offset), chunk_bytes_);
        if (region.slots[i].chunk != kNoChunk) std::memcpy(fresh + offset, address + offset, bytes);
        else if (region.host != nullptr) std::memcpy(fresh + offset, region.host + offset, bytes);
      }
    });
  }
  for (uint64_t c = 0; c < heap_chunks_.size(); ++c) {
    if (heap_chunks_[c].users == 0 || heap_chunks_[c].chunk == kNoChunk) continue;
    char* address = address_of(heap_first_chunk_ + c);
    replace_with_private(address, chunk_bytes_, [&](char* fresh) { std::memcpy(fresh, address, chunk_bytes_); });
  }
}

}  // namespace ooc
