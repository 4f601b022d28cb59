// Allocating and freeing, and what happens when no memory can be had.
#include <algorithm>

#include "core.h"
#include "last_error.h"

namespace ooc {

// ---- allocating -----------------------------------------------------------------------------------------------------

void* Core::malloc(uint64_t bytes) {
  Lock lock(mutex_);
  const ThreadState* thread = streams_.on() ? threads_.find() : nullptr;
  const bool known = thread != nullptr && streams_.runs_functions(thread->stream);
  return malloc_on(lock, bytes, known ? thread->stream : streams_.index(nullptr));
}

void* Core::malloc(uint64_t bytes, CUstream stream) {
  Lock lock(mutex_);
  return malloc_on(lock, bytes, streams_.index(stream));
}

void* Core::malloc_pinned(uint64_t bytes, CUstream stream, uint32_t access, uint64_t* token) {
  Lock lock(mutex_);
  if (token != nullptr) *token = kNoToken;
  void* address = malloc_on(lock, bytes, streams_.index(stream));
  Region* region = address != nullptr && !detached_ ? table_.find(address) : nullptr;
  if (region == nullptr) return address;
  const uint64_t pinned = holds_.pin_for_user(region, access);
  if (token != nullptr) *token = pinned;
  // The pin as the running function's allocation is not needed beside it. Where no function ever begins it would not
  // end.
  holds_.release_newest(region, holder());
  return address;
}

void* Core::malloc_absent(uint64_t bytes) {
  if (bytes <= small_limit_ || detached_) return malloc(bytes);
  Lock lock(mutex_);
  if (!table_.fits(bytes)) return nullptr;
  Region* region = mappings_.make(lock, static_cast<uint32_t>(geometry_.chunks_for(bytes)));
  if (region == nullptr) return nullptr;
  for (Slot& slot : region->slots) slot.state = SlotState::kBlank;
  region->in_ranges = true;
  begin_variable(region, bytes, threads_.find());
  return geometry_.address(region);
}

void* Core::malloc_on(Lock& lock, uint64_t bytes, uint32_t stream) {
  bytes = std::max<uint64_t>(bytes, 1);
  if (paused_ != 0) {
    if (detached_) return malloc_failed(bytes, Room::kNone);
    if (asleep() && pass_pause(lock) != OOC_OK) return malloc_failed(bytes, Room::kRefused);
  }
  if (streams_.on() && device_lost(lock)) return malloc_failed(bytes, Room::kRefused);
  return bytes <= small_limit_ ? malloc_small(lock, bytes, stream) : malloc_region(lock, bytes, stream);
}

void Core::count_allocation() {
  allocations_.allocated(table_.live_bytes() + slabs_.live_bytes(), table_.live_chunks(), slabs_.used());
}

void Core::begin_variable(Region* region, uint64_t bytes, const ThreadState* thread) {
  table_.begin_variable(region, bytes);
  if (iterations_.records(thread)) iterations_.recorder().allocate(region, thread->in_function);
  count_allocation();
  watch_.allocated(region);
}

// Whose pins end with its functions; null where the memory may be for work of a library's, which ends by itself.
ThreadState* Core::holder() {
  ThreadState* thread = threads_.find();
  return thread != nullptr && (thread->in_function || threads_.works() == 0) ? thread : nullptr;
}

HostBusy Core::allocates(bool takes_room) const {
  const ThreadState* thread = takes_room ? threads_.find() : nullptr;
  const bool inside = thread != nullptr && thread->in_function;
  return {inside ? measuring(thread) : nullptr, inside ? thread->stream_handle : nullptr};
}

bool Core::runs_on_host() const {
  const ThreadState* thread = threads_.find();
  return thread != nullptr && thread->in_function && thread->on_host;
}

// The chunks of a region that is nobody's, which the driver may refuse to unmap.
void Core::give_back(Region* region) {
  if (!mappings_.destroy(region)) table_.cache(region);
}

// Maps chunks, taken by the caller, behind the slots that have none, of a region that is nobody's. Returns false, with an
// error, if the driver refused; then the region is gone and the chunks are in the pool.
bool Core::complete_region(Lock& lock, Region* region, const Chunk* chunks) {
  CUresult result = CUDA_SUCCESS;
  uint32_t missing = region->count - region->resident;
  const auto map_run = [&](const Piece& run, bool has_chunk) {
    if (has_chunk) return true;
    lock.unlock();
    result = mappings_.map(run, chunks);
    lock.lock();
    if (result != CUDA_SUCCESS) return false;
    region->order.arrival.add(mappings_.take_users(chunks, run.count));
    for (Slot& slot : run.slots()) slot.put(*chunks++, SlotState::kResident);
    table_.gained(region, run.count);
    missing -= run.count;
    return true;
  };
  if (each_run(Piece::whole(region), &Slot::has_chunk, map_run)) return true;
  for (; missing > 0; --missing) mappings_.give(*chunks++, nullptr);
  give_back(region);
  set_last_error("mapping chunks for a variable failed: " + describe(device_.driver(), result), OOC_DRIVER_FAILURE);
  return false;
}

void* Core::malloc_region(Lock& lock, uint64_t bytes, uint32_t stream) {
  if (!table_.fits(bytes)) return nullptr;
  const auto count = static_cast<uint32_t>(geometry_.chunks_for(bytes));
  // What is incomplete is nobody's until the rest is there, so it is only taken where that needs no waiting.
  const bool incomplete = idle_.count() >= count;
  const auto usable = [&](const Region* cached) { return streams_.idle_for(stream, cached); };
  Region* region = table_.take_cached(count, incomplete, usable);
  const HostBusy busy = allocates(region == nullptr || !region->fully_resident());
  if (region == nullptr || !region->fully_resident()) {
    std::vector<Chunk> chunks(region == nullptr ? count : count - region->resident);
    const auto missing = static_cast<uint32_t>(chunks.size());
    if (const Room room = take_room(lock, missing, chunks.data(), count); room != Room::kMade) {
      if (region != nullptr) give_back(region);
      return runs_on_host() ? malloc_in_place(lock, bytes) : malloc_failed(bytes, room);
    }
    if (region == nullptr) region = mappings_.make(lock, count);
    if (region == nullptr) {
      for (const Chunk chunk : chunks) mappings_.give(chunk, nullptr);
      return nullptr;
    }
    if (!complete_region(lock, region, chunks.data())) return nullptr;
  }
  if (!streams_.wait_for_memory(stream, region->order.arrival)) {
    table_.cache(region);
    return malloc_failed(bytes, Room::kRefused);
  }
  ThreadState* thread = threads_.find();
  region->in_ranges = false;
  begin_variable(region, bytes, thread);
  holds_.add(region, holder());
  note_need();
  if (thread != nullptr && thread->measured_need > 0) measure_need(*thread);
  return geometry_.address(region);
}

void* Core::malloc_small(Lock& lock, uint64_t bytes, uint32_t stream) {
  // Slabs never leave the device, so they get half of it. What finds no room there is a variable like any other.
  bool backed = false;
  const uint64_t offset = slabs_.place(bytes, std::max<uint64_t>(pool_.limit() / 2, 1), stream, backed);
  if (offset == Slabs::kFailed) return malloc_region(lock, bytes, stream);
  Room room = Room::kMade;
  while (!backed && room == Room::kMade) {
    const uint64_t chunk = slabs_.next_unbacked(offset);
    backed = chunk == Slabs::kFailed;
    if (!backed) room = back_slab(lock, chunk);
  }
  if (room == Room::kMade && !slabs_.wait_for_block(offset, stream)) room = Room::kRefused;
  if (room != Room::kMade) {
    slabs_.abandon(offset);
    return runs_on_host() ? malloc_in_place(lock, bytes) : malloc_failed(bytes, room);
  }
  slabs_.begin_block(bytes);
  count_allocation();
  note_need();
  return slabs_.address(offset);
}

Core::Room Core::back_slab(Lock& lock, uint64_t chunk) {
  const ThreadState* thread = threads_.find();
  if (slabs_.pending(chunk)) {  // whoever backs it must not wait for the end of this thread's function
    const Starving starving(threads_, thread != nullptr && thread->in_function);
    changed_.wait(lock, [&] { return !slabs_.pending(chunk); });
    return Room::kMade;  // or the caller finds it without memory again
  }
  slabs_.set_pending(chunk, true);
  Chunk memory = kNoChunk;
  Room room = take_room(lock, 1, &memory, 0);
  if (room == Room::kMade && !slabs_.back(lock, chunk, memory)) room = Room::kRefused;
  slabs_.set_pending(chunk, false);
  changed_.notify_all();
  return room;
}

// ---- what does not fit ----------------------------------------------------------------------------------------------

void* Core::malloc_failed(uint64_t bytes, Room room) {
  if (room == Room::kRefused) {
    set_last_error(describe_refusal(), OOC_DRIVER_FAILURE);
    return nullptr;
  }
  ThreadState* thread = threads_.find();
  const bool inside = thread != nullptr && thread->in_function;
  const bool measuring = stand_ins_.on() && inside && !thread->writes && device_.host_accessible();
  const uint64_t chunks = geometry_.chunks_for(bytes);
  if (!detached_ && !measuring) {
    const std::string function =
        inside ? recorder().function_name(thread->function) : "(an allocation outside any function)";
    set_last_error(describe_need(function, holds_.pinned_chunks() + chunks));
    return nullptr;
  }
  void* block = stand_ins_.allocate(bytes);
  if (block == nullptr) {
    set_last_error("no host memory for " + std::to_string(bytes) + " bytes");
    return nullptr;
  }
  if (!detached_) {
    thread->measured_chunks += chunks;
    measure_need(*thread);
  }
  return block;
}

void Core::measure_need(ThreadState& thread) {
  thread.measured_need = std::max(thread.measured_need, holds_.pinned_chunks() + thread.measured_chunks);
}

// ---- freeing --------------------------------------------------------------------------------------------------------

void Core::free_served_by_host(void* address) {
  const uint64_t bytes = stand_ins_.free(address);
  ThreadState* thread = threads_.find();
  if (bytes > 0 && thread != nullptr && thread->in_function && thread->measured_need > 0)
    thread->measured_chunks -= std::min(thread->measured_chunks, geometry_.chunks_for(bytes));
}

void Core::free(void* address) {
  if (free_later(address)) return;
  const Lock lock(mutex_);
  const ThreadState* thread = streams_.on() ? threads_.find() : nullptr;
  const bool inside = thread != nullptr && thread->in_function;
  free_after(address, inside ? streams_.now(thread->stream) : streams_.now_everywhere());
}

void Core::free(void* address, CUstream stream) {
  if (free_later(address)) return;
  const Lock lock(mutex_);
  free_after(address, streams_.now(streams_.index(stream)));
}

void Core::free_after(void* address, const Moments& uses) {
  if (!geometry_.owns(address)) {
    free_served_by_host(address);
    return;
  }
  allocations_.freed();
  if (geometry_.in_slabs(address)) {
    slabs_.free(address, uses);
    return;
  }
  Region* region = table_.find(address);
  if (region == nullptr || address != geometry_.address(region)) return;
  watch_.freed(region);
  iterations_.recorder().free(region, iterations_.recorded_function_runs());
  streams_.used(region, uses);
  streams_.freed();
  holds_.freed(region);
  table_.end_variable(region);
  if (detached_) return;
  transitions_.release(region);
  if (threads_.starving > 0 || room_waiters_ > 0 || idle_wanted_) changed_.notify_all();
}

int Core::discard(const void* address) {
  Lock lock(mutex_);
  Region* region = detached_ ? nullptr : table_.find(address);
  if (region == nullptr) return fail(OOC_INVALID, "no variable that could be discarded lies at this address");
  ThreadState* thread = threads_.find();
  if (thread != nullptr && !thread->in_function) holds_.release(thread->held);
  const RegionHandle handle{region, region->generation};
  const auto used = [](const Slot& slot) { return slot.pins > 0 || slot.kept > 0 || slot.host_mapped; };
  const auto in_use = [&] { return handle.get() == nullptr || region->pins > 0 || std::ranges::any_of(region->slots, used); };
  while (!in_use() && !device_.lost() && (region->moving > 0 || region->lifted > 0 || region->shift != nullptr)) wait_a_while(lock);
  if (in_use() || region->moving > 0) return fail(OOC_INVALID, "a variable that is in use cannot be discarded");
  each_run(Piece::whole(region), &Slot::has_chunk, [this](const Piece& run, bool has_chunks) {
    if (has_chunks && !mappings_.unmap(run)) mappings_.forget(run);  // what it holds is worth nothing either way
    return true;
  });
  host_.invalidate(region);
  host_.release(region);
  for (Slot& slot : region->slots) slot.state = SlotState::kBlank;
  iterations_.recorder().discard(region);
  changed_.notify_all();
  return OOC_OK;
}

bool Core::exposed(const void* address) {
  const Lock lock(mutex_);
  if (detached_) return false;
  if (geometry_.in_slabs(address)) return slabs_.pinned(address);
  const Region* region = table_.find(address);
  return region != nullptr && region->writable_pins > 0;
}

void Core::record_use(void* address, CUstream stream) {
  const Lock lock(mutex_);
  if (!streams_.on() || detached_) return;
  const Moments now = streams_.now(streams_.index(stream));
  if (Region* region = table_.find(address)) streams_.used(region, now);
  else if (geometry_.in_slabs(address)) slabs_.used(address, now);
}

void Core::stream_lasts(CUstream stream) {
  const Lock lock(mutex_);
  streams_.lasts(stream);
}

void Core::release_cached() {
  const RelaxedCaptures relaxed(streams_.capturable());
  const Lock lock(mutex_);
  if (detached_) return;
  idle_.reclaim_all();
  mappings_.bury_all();
  mappings_.vacate_all();
  pool_.release_free();
}

}  // namespace ooc
