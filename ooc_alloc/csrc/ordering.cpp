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

Moments Core::all_moments(const Region* region) {
  Moments all = region->uses;
  all.add(region->arrival);
  all.add(region->out);
  return all;
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

// The function's stream waits for what is under way to its operands. Where it has to, the wait is timed: that is a stall.
void Core::begin_on_stream(ThreadState& thread, CUstream stream, bool recorded) {
  thread.stream_handle = stream;
  const Region* waits = nullptr;
  for (const Hold& handle : thread.held) {
    Region* region = handle.get();
    if (region == nullptr || region->arrival.empty()) continue;
    if (order_->over(region->arrival)) region->arrival.clear();
    if (waits == nullptr && !region->arrival.empty()) waits = region;
  }
  const bool measure = recorded && iterations_to_measure_ > 0;
  const StreamTimer::Start waiting = waits != nullptr ? timer_->start(stream) : nullptr;
  const StreamTimer::Start before = waits != nullptr && measure ? timer_->start(stream) : nullptr;
  for (const Hold& handle : thread.held)
    if (const Region* region = handle.get()) wait_for_memory(thread.stream, region->arrival);
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
  for (const Hold& handle : thread.held)
    if (Region* region = handle.get()) region->uses.add(moment);
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
  if (!hide_host_copy(region, 0, region->count)) region->leaky = true;
  if (order_) {
    Moments reads;
    for (const Moment& moment : region->arrival)
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

// Before chunks are mapped behind slots and filled: the copy stream waits for who used the chunks, and the addresses are
// made free.
void Core::prepare_in(Lock& lock, Region* region, Piece piece, const Chunk* chunks) {
  wait_for_memory(StreamOrder::kIn, take_moments(chunks, piece.count));
  unmap_stale(lock, region, piece);
}

// What the slots' addresses are still mapped to is unmapped, once the host copy is complete. The slots are marked; the lock
// may be given up.
void Core::unmap_stale(Lock& lock, Region* region, Piece piece) {
  for (size_t i = 0; i < region->stale.size();) {
    if (region->stale[i].first >= piece.first + piece.count || piece.first >= region->stale[i].first + region->stale[i].count) {
      ++i;
      continue;
    }
    const Region::Stale old = region->stale[i];
    region->stale.erase(region->stale.begin() + static_cast<std::ptrdiff_t>(i));
    order_->synchronize(old.after, Edge::kUseBeforeUnmap);
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
  else region->arrival.add(moment);
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
    bool leaky = grave.leaky;
    for (const auto& [first, count] : grave.mapped)
      if (device_.unmap(address_of(grave.first + first), count * chunk_bytes_) != CUDA_SUCCESS) leaky = true;
    if (!leaky) space_->give(grave.first, grave.count);
  }
  graves_.clear();
}

}  // namespace ooc
