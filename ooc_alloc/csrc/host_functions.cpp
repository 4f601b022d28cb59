// Functions on host memory (ooc_core_function_begin_host): what fits no budget, and cannot be cut, runs all the same.
// Chunks of its operands that are not on the device stay where they are, and their addresses lead there: a driver can
// map physical host memory like device memory (host_chunks.h, docs/decisions/0004-host-backed-memory.md).
//
// Such memory is not what host copies are made of otherwise, so a variable's host copy moves there when such a function
// first uses it. The slots are `kept` while the function holds them: nobody brings them in. Their host copy is what the
// function reads and writes, so it stays valid. Afterwards the addresses go on leading there, until a chunk comes in.
//
// All of it is done with the lock held, and where functions run on streams the host waits for all that is enqueued,
// before and after. It is the last resort, and slow.
#include <algorithm>
#include <cstring>

#include "core.h"

namespace ooc {

// Throws std::runtime_error if the driver has no such memory.
void Core::prepare_host_functions() {
  if (function_arena_) return;
  auto chunks = std::make_unique<HostChunks>(device_.driver(), device_.device(), arena_->budget(), chunk_bytes_);
  function_arena_ = std::make_unique<HostArena>(device_.driver(), arena_->budget(), chunks.get());
  function_chunks_ = std::move(chunks);
  function_arena_->share_budget(arena_.get());
  arena_->share_budget(function_arena_.get());
}

// Until nothing of the variables moves. What is under way ends without this thread. False: it does not.
bool Core::settle_regions(Lock& lock, const std::vector<Hold>& runs) {
  const auto moves = [](const Hold& run) {
    const Region* region = run.get();
    return region != nullptr && region->moving > 0;
  };
  while (std::any_of(runs.begin(), runs.end(), moves)) {
    if (device_.lost() && device_lost(lock)) return false;
    wait_a_while(lock);
  }
  return true;
}

// The host copy of a variable of which nothing moves, to memory that can be mapped. False: there is no such memory
// left.
bool Core::move_host_block(Region* region) {
  HostArena* arena = function_arena_.get();
  if (region->host != nullptr && region->arena == arena) return true;
  char* block = arena->allocate(region->bytes);
  if (block == nullptr) return false;
  for (uint32_t i = 0; i < region->count; ++i) {
    const uint64_t offset = i * chunk_bytes_;
    if (region->slots[i].host_valid)
      std::memcpy(block + offset, region->host + offset, std::min(chunk_bytes_, region->bytes - offset));
  }
  if (region->host != nullptr) free_host_block(region);
  region->host = block;
  region->arena = arena;
  if (order_) wait_for_host_block(region);
  return true;
}

bool Core::hide_host_copy(Region* region, uint32_t first, uint32_t count) {
  for (uint32_t i = first; i < first + count;) {
    uint32_t end = i;
    while (end < first + count && region->slots[end].host_mapped) ++end;
    if (end == i) {
      ++i;
      continue;
    }
    if (device_.unmap(address_of(region->first + i), (end - i) * chunk_bytes_) != CUDA_SUCCESS) return false;
    for (; i < end; ++i) region->slots[i].host_mapped = false;
  }
  return true;
}

// Slots without a chunk.
bool Core::map_run_in_place(Region* region, uint32_t first, uint32_t count) {
  for (uint32_t i = first; i < first + count;) {
    uint32_t end = i;
    while (end < first + count && !region->slots[end].host_mapped) ++end;
    if (end == i) {
      ++i;
      continue;
    }
    const char* host = region->host + i * chunk_bytes_;
    if (device_.map_host(address_of(region->first + i), *function_chunks_, host, end - i) != CUDA_SUCCESS) return false;
    for (; i < end; ++i) {
      Slot& slot = region->slots[i];
      slot.host_mapped = true;
      slot.blank = false;  // its bytes are in host memory now, whatever they are
      if (!slot.host_valid) ++region->host_valid;
      slot.host_valid = true;
    }
  }
  return true;
}

int Core::map_in_place(const std::vector<Hold>& runs) {
  for (const Hold& run : runs) {
    Region* region = run.get();
    if (region == nullptr || all_resident(run, region)) continue;
    if (!move_host_block(region))
      return fail(OOC_OUT_OF_MEMORY, "no host memory for a variable of " + std::to_string(region->bytes) +
                                         " bytes to be used there: " +
                                         function_arena_->describe(host_used()));
    for (uint32_t i = run.first, end = run.end(region), last = i; i < end; i = last) {
      const bool absent = region->slots[i].chunk == kNoChunk;
      while (last < end && (region->slots[last].chunk == kNoChunk) == absent) ++last;
      if (absent && !map_run_in_place(region, i, last - i))
        return fail(OOC_DRIVER_FAILURE,
                    "the driver did not map host memory in place of a variable; its bytes are safe: " + refused());
    }
  }
  return OOC_OK;
}

// What is on the device is pinned there, run by run, and what is not is kept off it.
void Core::hold_in_place(ThreadState& thread, const std::vector<Hold>& runs, bool recorded) {
  for (const Hold& run : runs) {
    Region* region = run.get();
    if (region == nullptr) continue;
    region->in_ranges = true;
    region->last_function = thread.function;
    used_.touch(region);
    thread.writes |= run.writes;
    if (recorded) recorder_.mention(region, run);
    for (uint32_t i = run.first, end = run.end(region), last = i; i < end; i = last) {
      Hold part = run;
      part.kept = region->slots[i].chunk == kNoChunk;
      while (last < end && (region->slots[last].chunk == kNoChunk) == part.kept) ++last;
      part.first = i;
      part.count = last - i;
      add_hold(part);
      thread.held.push_back(part);
      if (part.writes && !part.kept) mark_written(region, part.first, part.count);
    }
  }
}

int Core::function_begin_host(uint32_t function, const ooc_operand* operands, uint32_t count) {
  ThreadState& thread = thread_state();
  if (thread.in_function) return fail(OOC_NESTED, "a function began within a function of the same thread");
  Lock lock(mutex_);
  while (paused_) wait_a_while(lock);
  if (detached_) {
    thread.in_function = true;
    return OOC_OK;
  }
  prepare_host_functions();
  release_held(thread.held);
  if (active_functions() == 0 && !orphans_.empty()) release_held(orphans_);
  if (strict_)
    if (const int status = evict_unpinned(lock)) return status;
  ++serial_;
  const std::vector<Hold> runs = runs_of(operands, count);
  if (!settle_regions(lock, runs)) return fail(OOC_DRIVER_FAILURE, describe_loss());  // from here on the lock is not given up
  if (order_) {
    if (thread.stream < StreamOrder::kFirstCompute) thread.stream = order_->compute_stream(nullptr);
    order_->synchronize_all();
    if (device_.lost()) return fail(OOC_DRIVER_FAILURE, describe_loss());
    unmap_stale();
  }
  if (const int status = map_in_place(runs)) return status;
  if (sequence_thread_ == nullptr) sequence_thread_ = &thread;
  const bool recorded = sequence_thread_ == &thread;
  if (recorded) recorder_.begin_function(function, now_seconds());
  thread.writes = false;
  thread.on_host = true;
  thread.function = function;
  hold_in_place(thread, runs, recorded);
  if (recorded) {
    const uint64_t prefix = recorder_.end_operands();
    if (scheduler_ != nullptr) scheduler_->function_started(recorder_.current().functions() - 1, prefix);
  }
  progress_ += kOneRuns;
  thread.in_function = true;
  thread.operand_count = static_cast<uint32_t>(thread.held.size());
  thread.measured_chunks = thread.measured_need = 0;
  note_need();
  if (order_) begin_on_stream(thread, thread.stream_handle, recorded);
  if (watched()) watch_function(thread, recorded);
  ++stats_.functions;
  ++stats_.host_backed_function_count;
  return OOC_OK;
}

// An allocation of such a function that fits no budget.
void* Core::malloc_in_place(uint64_t bytes) {
  ThreadState* thread = find_thread_state();
  Region* region = new_region(static_cast<uint32_t>(chunk_of_(bytes + chunk_bytes_ - 1)));
  if (region == nullptr) return nullptr;
  region->bytes = bytes;
  region->in_ranges = true;
  const bool placed = move_host_block(region) && map_run_in_place(region, 0, region->count);
  if (!placed) {
    set_last_error("no host memory for a variable of " + std::to_string(bytes) +
                   " bytes in place of device memory: " + function_arena_->describe(host_used()));
    free_host_block(region);
    destroy(region);
    return nullptr;
  }
  begin_variable(region, bytes, thread);
  Hold hold{{region, region->generation}};
  hold.count = region->count;
  hold.kept = true;
  add_hold(hold);
  thread->held.push_back(hold);
  return address_of(region->first);
}

}  // namespace ooc
