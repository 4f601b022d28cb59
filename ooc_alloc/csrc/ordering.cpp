// The core where functions run on streams: who waits for whom, and memory that is given away before it is unmapped.
//
// A chunk goes to its next user as soon as the copy of its contents has been enqueued: the next user's stream waits for
// that copy, the host does not. The chunk is then mapped at two addresses for a while; the old mapping is undone when
// nothing enqueued can touch it any more, and at the latest when the old address is to be mapped again.
#include <algorithm>

#include "core.h"

namespace ooc {

void Core::wait_for_memory(uint32_t stream, const Moments& moments) {
  for (const Moment& moment : moments) {
    const Edge edge = moment.stream == StreamOrder::kIn    ? Edge::kInBeforeUse
                      : moment.stream == StreamOrder::kOut ? Edge::kOutBeforeChunk
                                                           : Edge::kUseBeforeChunk;
    order_->make_wait(stream, moment, edge);
  }
}

// ---- parts ----------------------------------------------------------------------------------------------------------

// A function that uses one range must not wait for the copy of another, nor a copy for the use of another.
namespace {

bool overlap(const Region::Part& part, uint32_t first, uint32_t count) {
  return part.first < first + count && first < part.first + part.count;
}

}  // namespace

Moments Core::moments_of(const Region* region, uint32_t first, uint32_t count) {
  Moments all = region->uses;
  all.add(region->arrival);
  all.add(region->out);
  for (const Region::Part& part : region->parts) {
    if (!overlap(part, first, count)) continue;
    all.add(part.uses);
    all.add(part.arrival);
  }
  return all;
}

Moments Core::arrival_of(const Region* region, uint32_t first, uint32_t count) {
  Moments all = region->arrival;
  for (const Region::Part& part : region->parts)
    if (overlap(part, first, count)) all.add(part.arrival);
  return all;
}

// What is over is forgotten when there are many; if they are still too many, they are not told apart any more.
Region::Part& Core::part_of(Region* region, uint32_t first, uint32_t count) {
  constexpr size_t kMostParts = 64;
  std::vector<Region::Part>& parts = region->parts;
  for (Region::Part& part : parts)
    if (part.first == first && part.count == count) return part;
  if (parts.size() >= kMostParts) {
    for (Region::Part& part : parts) {
      order_->prune(part.uses);
      order_->prune(part.arrival);
    }
    const auto over = [](const Region::Part& part) { return part.uses.empty() && part.arrival.empty(); };
    parts.erase(std::remove_if(parts.begin(), parts.end(), over), parts.end());
  }
  if (parts.size() >= kMostParts) {
    for (const Region::Part& part : parts) {
      region->uses.add(part.uses);
      region->arrival.add(part.arrival);
    }
    parts.clear();
  }
  parts.push_back({first, count, {}, {}});
  return parts.back();
}

void Core::add_arrival(Region* region, uint32_t first, uint32_t count, const Moments& moments) {
  (region->in_ranges ? part_of(region, first, count).arrival : region->arrival).add(moments);
}

bool Core::still_arrives(Region* region, const Hold& hold) {
  if (!region->arrival.empty() && order_->over(region->arrival)) region->arrival.clear();
  bool any = !region->arrival.empty();
  const uint32_t count = hold.end(region) - hold.first;
  for (Region::Part& part : region->parts) {
    if (part.arrival.empty() || !overlap(part, hold.first, count)) continue;
    if (order_->over(part.arrival)) part.arrival.clear();
    any |= !part.arrival.empty();
  }
  return any;
}

Moments Core::take_moments(const Chunk* chunks, uint32_t count) {
  Moments all;
  for (uint32_t i = 0; i < count; ++i) {
    const auto index = static_cast<size_t>(chunks[i]);
    if (index >= chunk_after_.size() || !chunk_after_[index]) continue;
    all.add(*chunk_after_[index]);
    chunk_after_[index].reset();
  }
  order_->prune(all);
  return all;
}

void Core::retire(Chunk chunk, const std::shared_ptr<const Moments>& after) {
  const auto index = static_cast<size_t>(chunk);
  if (chunk_after_.size() <= index) chunk_after_.resize(index + 1);
  chunk_after_[index] = after;
  pool_->give(chunk);
}

// A copy, whole or in part, has been enqueued on one of the copy streams; others will wait for just this one.
Moment Core::enqueued(Direction direction, StreamTimer::Start timed, uint64_t event) {
  const bool out = direction == Direction::kOut;
  timer_->stop(device_.stream(direction), timed, out ? &stats_.copy_out_seconds : &stats_.copy_in_seconds, event);
  const Moment moment = order_->now(out ? StreamOrder::kOut : StreamOrder::kIn);
  order_->mark(moment.stream);
  return moment;
}

// The function's stream waits for what is under way to its operands. Where it has to, the wait is timed: that is a
// stall.
void Core::begin_on_stream(ThreadState& thread, CUstream stream, bool recorded) {
  thread.stream_handle = stream;
  const Region* waits = nullptr;
  for (const Hold& hold : thread.held) {
    Region* region = hold.get();
    if (region != nullptr && still_arrives(region, hold) && waits == nullptr) waits = region;
  }
  const bool measure = recorded && iterations_to_measure_ > 0;
  const StreamTimer::Start waiting = waits != nullptr ? timer_->start(stream) : nullptr;
  const StreamTimer::Start before = waits != nullptr && measure ? timer_->start(stream) : nullptr;
  for (const Hold& hold : thread.held) {
    const Region* region = hold.get();
    if (region == nullptr) continue;
    if (region->parts.empty()) wait_for_memory(thread.stream, region->arrival);
    else wait_for_memory(thread.stream, arrival_of(region, hold.first, hold.end(region) - hold.first));
  }
  if (waits != nullptr) {
    const bool watch = timeline_.on() && waiting != nullptr;
    const double now = watch ? now_seconds() : 0;
    timer_->stop(stream, waiting, &device_stall_,
                 watch ? watch_stall(OOC_EVENT_STALL_SWAP_IN, now, Timeline::kNotOver, waits) : Timeline::kNoEvent);
  }
  if (measure) timer_->function_started(stream, waits != nullptr, before);
}

// The host's times say when functions were enqueued; the device's, how long they ran.
void Core::measured(Trace& trace) {
  timer_->collect();
  if (iterations_to_measure_ == 0) return;
  --iterations_to_measure_;
  const std::vector<double> seconds = timer_->finish_iteration(sequence_thread_ != nullptr ? sequence_thread_->stream_handle : nullptr);
  if (seconds.size() != trace.seconds.size() || trace.overflow) return;
  trace.seconds = seconds;
  double start = 0;
  for (size_t i = 0; i < seconds.size(); ++i) {
    trace.starts[i] = start;
    start += seconds[i];
  }
}

void Core::end_on_stream(ThreadState& thread) {
  const Moment moment = order_->now(thread.stream);
  for (const Hold& hold : thread.held)
    if (Region* region = hold.get())
      (hold.whole() ? region->uses : part_of(region, hold.first, hold.count).uses).add(moment);
  const bool moves = stats_.swap_out_count + stats_.clean_drop_count > 0;
  if (!(freed_since_mark_ && moves) && !(scheduler_ != nullptr && scheduler_->waits_for_last_function())) return;
  order_->mark(thread.stream);
  freed_since_mark_ = false;
}

void Core::record_use(void* address, CUstream stream) {
  Lock lock(mutex_);
  if (!order_ || detached_) return;
  const Moment moment = order_->now(order_->compute_stream(stream));
  if (Region* region = find(address)) {
    region->uses.add(moment);
  } else if (owns(address)) {
    const auto offset = static_cast<uint64_t>(static_cast<char*>(address) - address_of(heap_first_chunk_));
    if (heap_->requested(offset) == 0) return;
    for (uint64_t c = heap_->first_chunk(offset); c <= heap_->last_chunk(offset); ++c) heap_chunks_[c].after.add(moment);
  }
}

// ---- copies ---------------------------------------------------------------------------------------------------------

void Core::free_host_block(Region* region) {
  if (region->host == nullptr) return;
  const auto shown = [](const Slot& slot) { return slot.host_mapped; };
  if (order_ && std::any_of(region->slots.begin(), region->slots.end(), shown))
    order_->synchronize(all_moments(region), Edge::kUseBeforeUnmap);
  if ((order_ && device_.lost()) || !hide_host_copy(region, 0, region->count)) {
    region->leaky = true;  // what its addresses lead to stays there, so they serve nobody else
    for (Slot& slot : region->slots) slot.host_mapped = false;
  }
  if (order_) {
    Moments reads;
    for (const Moment& moment : arrival_of(region, 0, region->count))
      if (moment.stream == StreamOrder::kIn) reads.add(moment);
    if (!order_->over(reads)) host_pending_.push_back({region->host, region->arena->rounded(region->bytes), reads});
  }
  region->arena->free(region->host, region->bytes);
  region->host = nullptr;
}

void Core::wait_for_host_block(const Region* region) {
  const char* end = region->host + region->arena->rounded(region->bytes);
  for (size_t i = 0; i < host_pending_.size();) {
    HostBlock& block = host_pending_[i];
    if (order_->over(block.after)) {
      block = host_pending_.back();
      host_pending_.pop_back();
      continue;
    }
    if (block.start < end && region->host < block.start + block.bytes)
      order_->make_wait(StreamOrder::kOut, block.after, Edge::kInBeforeHost);
    ++i;
  }
}

// Before chunks are mapped behind slots and filled: the copy stream waits for who used the chunks, and the addresses
// are made free.
void Core::prepare_in(Lock& lock, Region* region, Piece piece, const Chunk* chunks) {
  wait_for_memory(StreamOrder::kIn, take_moments(chunks, piece.count));
  unmap_stale(lock, region, piece);
}

// What the slots' addresses are still mapped to is unmapped, once the host copy is complete. The slots are marked; the
// lock may be given up.
void Core::unmap_stale(Lock& lock, Region* region, Piece piece) {
  for (size_t i = 0; i < region->stale.size();) {
    if (region->stale[i].first >= piece.first + piece.count || piece.first >= region->stale[i].first + region->stale[i].count) {
      ++i;
      continue;
    }
    const Region::Stale old = region->stale[i];
    region->stale.erase(region->stale.begin() + static_cast<std::ptrdiff_t>(i));
    order_->synchronize(old.after, Edge::kUseBeforeUnmap);
    if (device_.lost()) {  // the map that comes next is refused
      region->stale.push_back(old);
      return;
    }
    lock.unlock();
    device_.unmap(address_of(region->first + old.first), old.count * chunk_bytes_);
    lock.lock();
  }
}

bool Core::settle_enqueued(Lock& lock, const Transfer& transfer) {
  Region* region = transfer.region;
  bool copied = !transfer.failed;
  Moment moment = transfer.moment;
  if (!copied && transfer.direction == Direction::kIn) {  // the data must come: once more
    lock.unlock();
    copied = copy_slots(region, transfer.first, transfer.count, Direction::kIn);
    lock.lock();
    moment = enqueued(Direction::kIn, nullptr, Timeline::kNoEvent);
  }
  if (transfer.direction == Direction::kOut) region->out = moment;
  else add_arrival(region, transfer.first, transfer.count, moment);
  return end_transition(transfer, copied);
}

// ---- addresses ------------------------------------------------------------------------------------------------------

// The region's slots have lost their chunks; the addresses are unmapped later.
void Core::bury(Region* region) {
  Grave grave{region->first, region->count, region->leaky, {}, {}};
  for (const Region::Stale& stale : region->stale) {
    grave.mapped.emplace_back(stale.first, stale.count);
    grave.after.add(stale.after);
  }
  region->stale.clear();
  graves_.push_back(std::move(grave));
  constexpr size_t kMostGraves = 4096;  // when the daemon has no time, or there is none
  if (graves_.size() > kMostGraves) bury_all();
}

bool Core::bury_one(Lock& lock) {
  if (graves_.empty() || !order_->over(graves_.front().after)) return false;
  Grave grave = std::move(graves_.front());
  graves_.pop_front();
  lock.unlock();
  for (const auto& [first, count] : grave.mapped)
    if (device_.unmap(address_of(grave.first + first), count * chunk_bytes_) != CUDA_SUCCESS) grave.leaky = true;
  lock.lock();
  if (!grave.leaky) space_->give(grave.first, grave.count);
  return true;
}

void Core::bury_all() {
  for (const Grave& grave : graves_) {
    order_->synchronize(grave.after, Edge::kUseBeforeUnmap);
    if (device_.lost()) return;
    bool leaky = grave.leaky;
    for (const auto& [first, count] : grave.mapped)
      if (device_.unmap(address_of(grave.first + first), count * chunk_bytes_) != CUDA_SUCCESS) leaky = true;
    if (!leaky) space_->give(grave.first, grave.count);
  }
  graves_.clear();
}

}  // namespace ooc
