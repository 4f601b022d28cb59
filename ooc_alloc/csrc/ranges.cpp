// Functions that use parts of variables: operands that are ranges of addresses, pins of single slots, and variables
// that begin without a byte (blank slots).
#include <algorithm>

#include "core.h"

namespace ooc {
namespace {

// Where a range begins (+1) or ends (-1), in slots of the group-th variable of the function.
struct Limit {
  uint32_t group, slot;
  int ranges, reads, writes;
};

}  // namespace

// A sweep along each variable. Two ranges of it may overlap, touch or be the same: what one of them writes is written,
// and where the access changes, a new run begins.
std::vector<Hold> Core::runs_of(const ooc_operand* operands, uint32_t count) {
  std::vector<Region*> regions;  // by first operand
  std::vector<Limit> limits;
  for (uint32_t i = 0; i < count; ++i) {
    Region* region = find(operands[i].address);
    if (region == nullptr) continue;
    if (region->use_serial != serial_) {
      region->use_serial = serial_;
      region->group = static_cast<uint32_t>(regions.size());
      regions.push_back(region);
    }
    const auto* address = static_cast<const char*>(operands[i].address);
    const auto offset = static_cast<uint64_t>(address - address_of(region->first));
    const uint64_t bytes = std::min(operands[i].bytes, region->count * chunk_bytes_ - offset);
    const bool whole = operands[i].bytes == 0;
    const auto first = whole ? 0 : static_cast<uint32_t>(chunk_of_(offset));
    const auto end = whole ? region->count : static_cast<uint32_t>(chunk_of_(offset + bytes + chunk_bytes_ - 1));
    const int reads = operands[i].access & OOC_READ ? 1 : 0, writes = operands[i].access & OOC_WRITE ? 1 : 0;
    limits.push_back({region->group, first, 1, reads, writes});
    limits.push_back({region->group, end, -1, -reads, -writes});
  }
  std::sort(limits.begin(), limits.end(), [](const Limit& a, const Limit& b) {
    return a.group != b.group ? a.group < b.group : a.slot < b.slot;
  });
  std::vector<Hold> runs;
  int ranges = 0, reads = 0, writes = 0;
  for (size_t i = 0; i < limits.size(); ++i) {
    if (ranges > 0 && limits[i].slot > limits[i - 1].slot) {  // at the next variable none is open
      Region* region = regions[limits[i].group];
      Hold run{{region, region->generation}};
      run.first = limits[i - 1].slot;
      run.count = limits[i].slot - run.first;
      run.reads = reads > 0;
      run.writes = writes > 0;
      Hold* last = runs.empty() || runs.back().region != region ? nullptr : &runs.back();
      const bool continues = last != nullptr && last->first + last->count == run.first && last->reads == run.reads &&
                             last->writes == run.writes;
      if (continues) last->count += run.count;
      else runs.push_back(run);
    }
    ranges += limits[i].ranges;
    reads += limits[i].reads;
    writes += limits[i].writes;
  }
  return runs;
}

bool Core::hold_ranges(ThreadState& thread, const ooc_operand* operands, uint32_t count, bool recorded) {
  bool missing = false;
  for (Hold& run : runs_of(operands, count)) {
    Region* region = run.region;
    region->last_function = thread.function;
    used_.touch(region);
    thread.writes |= run.writes;
    const uint32_t access = (run.reads ? uint32_t{OOC_READ} : 0) | (run.writes ? uint32_t{OOC_WRITE} : 0);
    if (run.count == region->count) {
      run.count = 0;
      if (run.writes) region->write_serial = serial_;
      if (recorded) recorder_.use(region, access);
    } else {
      region->in_ranges = true;
      if (recorded) recorder_.use(region, access, run.first, run.count);
    }
    add_hold(run);
    thread.held.push_back(run);
    missing |= !all_resident(run, region);
  }
  return missing;
}

void Core::add_hold(const Hold& hold) {
  Region* region = hold.region;
  if (hold.whole()) {
    add_pin(region);
    return;
  }
  for (uint32_t i = hold.first; i < hold.first + hold.count; ++i) {
    Slot& slot = region->slots[i];
    if (hold.kept) {
      ++slot.kept;
    } else if (slot.pins++ == 0) {
      ++region->pinned_slots;
      if (region->pins == 0) ++pinned_chunks_;
    }
  }
}

void Core::drop_hold(const Hold& hold) {
  Region* region = hold.region;
  if (hold.whole()) {
    drop_pin(region);
    return;
  }
  for (uint32_t i = hold.first; i < hold.first + hold.count; ++i) {
    Slot& slot = region->slots[i];
    if (hold.kept) {
      --slot.kept;
    } else if (--slot.pins == 0) {
      --region->pinned_slots;
      if (region->pins == 0) --pinned_chunks_;
    }
  }
}

bool Core::all_resident(const Hold& hold, const Region* region) {
  if (region->fully_resident()) return true;
  if (hold.whole()) return false;
  const auto first = region->slots.begin() + hold.first;
  return std::all_of(first, first + hold.count, [](const Slot& slot) { return slot.resident(); });
}

uint64_t Core::absent_chunks(const std::vector<Hold>& held) {
  uint64_t absent = 0;
  for (const Hold& hold : held) {
    const Region* region = hold.get();
    if (region == nullptr || hold.kept) continue;
    for (uint32_t i = hold.first; i < hold.end(region); ++i) absent += region->slots[i].chunk == kNoChunk ? 1 : 0;
  }
  return absent;
}

// There is nothing to copy, and nobody can have used the address before.
bool Core::bring_blank(Lock& lock, Piece piece, const Chunk* chunks) {
  Region* region = piece.region;
  const uint32_t end = piece.first + piece.count;
  for (uint32_t i = piece.first; i < end; ++i) {
    region->slots[i].chunk = chunks[i - piece.first];
    region->slots[i].arriving = true;
  }
  region->moving += piece.count;
  moving_ += piece.count;
  const auto before = std::make_shared<const Moments>(order_ ? take_moments(chunks, piece.count) : Moments{});
  if (order_) unmap_stale(lock, region, piece);
  lock.unlock();
  char* address = address_of(region->first + piece.first);
  const bool usable = !order_ || !device_.lost();
  const CUresult mapped = usable ? device_.map(address, chunks, piece.count, *pool_, chunk_bytes_) : CUDA_ERROR_UNKNOWN;
  lock.lock();
  for (uint32_t i = piece.first; i < end; ++i) {
    Slot& slot = region->slots[i];
    slot.arriving = false;
    if (mapped == CUDA_SUCCESS) {
      slot.blank = false;
    } else {
      if (order_) retire(slot.chunk, before);
      else pool_->give(slot.chunk);
      slot.chunk = kNoChunk;
    }
  }
  if (mapped == CUDA_SUCCESS) {
    region->resident += piece.count;
    resident_chunks_ += piece.count;
    if (order_) add_arrival(region, piece.first, piece.count, *before);
  }
  region->moving -= piece.count;
  moving_ -= piece.count;
  if (region->doomed && region->moving == 0) dispose(region);
  if (timeline_.on()) watch_memory(now_seconds());
  changed_.notify_all();
  return mapped == CUDA_SUCCESS;
}

// A function of another thread uses some of it in host memory. Its pins may have outlasted it.
void Core::wait_for_kept(Lock& lock, const Hold& hold) {
  const auto kept = [](const Slot& slot) { return slot.kept > 0; };
  const ThreadState* thread = find_thread_state();
  const uint32_t waiting = thread != nullptr && thread->in_function ? 1 : 0;
  for (const Region* region = hold.get(); region != nullptr && region->in_ranges; region = hold.get()) {
    const auto begin = region->slots.begin();
    if (std::none_of(begin + hold.first, begin + hold.end(region), kept)) return;
    if (release_idle_threads()) continue;
    starving_ += waiting;
    wait_a_while(lock);
    starving_ -= waiting;
  }
}

void* Core::malloc_absent(uint64_t bytes) {
  if (bytes <= small_limit_ || detached_) return malloc(bytes);
  Lock lock(mutex_);
  if (!fits_addresses(bytes)) return nullptr;
  Region* region = new_region(static_cast<uint32_t>(chunk_of_(bytes + chunk_bytes_ - 1)));
  if (region == nullptr) return nullptr;
  for (Slot& slot : region->slots) slot.blank = true;
  region->in_ranges = true;
  begin_variable(region, bytes, find_thread_state());
  return address_of(region->first);
}

}  // namespace ooc
