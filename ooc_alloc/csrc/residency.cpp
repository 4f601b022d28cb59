// Moving regions between the device and the host: transitions. What a function needs is brought in by arrivals.cpp, room
// is made by room.cpp.
#include <algorithm>
#include <cstring>

#include "core.h"

namespace ooc {

bool Core::reclaim_host(uint64_t bytes) {
  bool any = false;
  for (Region* region = used_.oldest(); region != nullptr; region = region->newer) {
    if (region->host == nullptr || region->moving > 0 || !region->fully_resident()) continue;
    for (Slot& slot : region->slots) slot.host_valid = false;
    region->host_valid = 0;
    free_host_block(region);
    any = true;
    if (arena_->budget() - arena_->used() >= 2 * bytes) break;
  }
  return any;
}

bool Core::ensure_host_block(Region* region, bool reclaim) {
  if (region->host != nullptr) return true;
  region->arena = arena_.get();
  region->host = arena_->allocate(region->bytes);
  if (region->host == nullptr && reclaim && reclaim_host(region->bytes)) region->host = arena_->allocate(region->bytes);
  if (region->host != nullptr && order_) wait_for_host_block(region);
  return region->host != nullptr;
}

// Without the lock: the slots are marked as moving. Returns false also where the device is lost by now: the copy stream
// may not have been made to wait for who uses the bytes.
bool Core::copy_slots(Region* region, uint32_t first, uint32_t count, Direction direction) {
  if (device_.lost()) return false;
  char* device = address_of(region->first + first);
  char* host = region->host + first * chunk_bytes_;
  uint64_t left = slot_bytes(region, first, count);
  while (left > 0) {
    const uint64_t bytes = std::min({left, piece_chunks_ * chunk_bytes_, region->arena->extent_left(host)});
    if (device_.copy(direction, device, host, bytes) != CUDA_SUCCESS) return false;
    device += bytes;
    host += bytes;
    left -= bytes;
  }
  return true;
}

bool Core::verify_clean(Region* region, uint32_t first, uint32_t count) {
  if (order_) order_->synchronize(moments_of(region, first, count), Edge::kUseBeforeOut);
  const uint64_t bytes = slot_bytes(region, first, count);
  std::vector<char> now(bytes);
  const auto address = reinterpret_cast<CUdeviceptr>(address_of(region->first + first));
  if (device_.driver().cuMemcpyDtoH(now.data(), address, bytes) != CUDA_SUCCESS) return true;  // says nothing
  return std::memcmp(now.data(), region->host + first * chunk_bytes_, bytes) == 0;
}

bool Core::drop_clean(const Piece& piece, uint32_t first, uint32_t count) {
  Region* region = piece.region;
  if (!unmap_slots(region, first, count)) return false;
  stats_.clean_drop_bytes += slot_bytes(region, first, count);
  ++stats_.clean_drop_count;
  if (timeline_.on()) {
    const double now = now_seconds();
    ooc_event event = new_event(OOC_EVENT_DROP, now, now);
    name_variable(event, region);
    event.bytes = slot_bytes(region, first, count);
    if (piece.on_demand) event.flags |= OOC_EVENT_ON_DEMAND;
    timeline_.add(event);
    watch_memory(now);
  }
  changed_.notify_all();
  return true;
}

bool Core::start_out(Lock& lock, Piece piece, std::vector<Transfer>& transfers, bool stay) {
  if (device_.lost()) return false;
  Region* region = piece.region;
  const uint32_t end = piece.first + piece.count;
  for (uint32_t i = piece.first; i < end && i < region->count && region->live && region->pins == 0;) {
    Slot& slot = region->slots[i];
    if (!slot.at_rest() || slot.pins > 0 || (stay && slot.host_valid)) {
      // Its copy is under way already; when it is made, the slot leaves after all.
      if (slot.pins == 0) slot.staying &= stay;
      ++i;
      continue;
    }
    uint32_t last = i;
    while (last < end && last < region->count && region->slots[last].at_rest() && region->slots[last].pins == 0 &&
           region->slots[last].host_valid == slot.host_valid)
      ++last;
    if (slot.host_valid && strict_ && !verify_clean(region, i, last - i)) {
      strict_failure_ = std::string("function ") + recorder_.function_name(region->last_function) +
                        " wrote a variable of " + std::to_string(region->bytes) +
                        " bytes that its schema declares as read only";
      mark_written(region, i, last - i);
      continue;
    }
    if (slot.host_valid) {
      if (!drop_clean(piece, i, last - i)) return false;
      i = last;
      continue;
    }
    if (!ensure_host_block(region, !stay)) return false;
    for (uint32_t s = i; s < last; ++s) {
      region->slots[s].leaving = true;
      region->slots[s].staying = stay;
      region->slots[s].overwritten = false;
    }
    region->moving += last - i;
    moving_ += last - i;
    Transfer transfer{region, i, last - i, Direction::kOut, nullptr, now_seconds(), false, {}};
    if (timeline_.on()) transfer.watched = watch_copy(region, Direction::kOut, transfer.started, piece.on_demand);
    if (order_) order_->make_wait(StreamOrder::kOut, moments_of(region, i, last - i), Edge::kUseBeforeOut);
    const auto timed = order_ ? timer_->start(device_.stream(Direction::kOut)) : nullptr;
    lock.unlock();
    transfer.failed = !copy_slots(region, i, last - i, Direction::kOut);
    if (!order_) transfer.event = device_.record(Direction::kOut);
    lock.lock();
    if (order_) transfer.moment = enqueued(Direction::kOut, timed, transfer.watched);
    transfers.push_back(transfer);
    i = last;
  }
  return true;
}

bool Core::start_in(Lock& lock, Piece piece, const Chunk* chunks, std::vector<Transfer>& transfers) {
  Region* region = piece.region;
  if (device_.lost()) {
    for (uint32_t i = 0; i < piece.count; ++i) pool_->give(chunks[i]);
    return false;
  }
  if (region->slots[piece.first].blank) return bring_blank(lock, piece, chunks);
  for (uint32_t i = 0; i < piece.count; ++i) {
    region->slots[piece.first + i].chunk = chunks[i];
    region->slots[piece.first + i].arriving = true;
  }
  region->moving += piece.count;
  moving_ += piece.count;
  Transfer transfer{region, piece.first, piece.count, Direction::kIn, nullptr, now_seconds(), false, {}};
  if (timeline_.on()) transfer.watched = watch_copy(region, Direction::kIn, transfer.started, piece.on_demand);
  if (order_) prepare_in(lock, region, piece, chunks);
  // A function used them in host memory (host_functions.cpp): the address is still taken.
  const bool shown = function_arena_ && region->arena == function_arena_.get();
  const bool usable = !order_ || !device_.lost();  // else something enqueued may still use the address
  const bool vacant = usable && (!shown || hide_host_copy(region, piece.first, piece.count));
  lock.unlock();
  char* address = address_of(region->first + piece.first);
  const CUresult mapped =
      vacant ? device_.map(address, chunks, piece.count, *pool_, chunk_bytes_) : CUDA_ERROR_UNKNOWN;
  StreamTimer::Start timed = nullptr;
  if (mapped == CUDA_SUCCESS && order_) {
    lock.lock();
    timed = timer_->start(device_.stream(Direction::kIn));
    lock.unlock();
  }
  if (mapped == CUDA_SUCCESS) {
    transfer.failed = !copy_slots(region, piece.first, piece.count, Direction::kIn);
    if (!order_) transfer.event = device_.record(Direction::kIn);
  }
  lock.lock();
  if (mapped == CUDA_SUCCESS) {
    if (order_) transfer.moment = enqueued(Direction::kIn, timed, transfer.watched);
    transfers.push_back(transfer);
    return true;
  }
  if (ooc_event* event = timeline_.at(transfer.watched)) event->end = event->start;  // it never began
  // The copy stream waits for who used the chunks before.
  const auto used_before = order_ ? std::make_shared<const Moments>(Moments{order_->now(StreamOrder::kIn)}) : nullptr;
  for (uint32_t i = piece.first; i < piece.first + piece.count; ++i) {
    if (used_before) retire(region->slots[i].chunk, used_before);
    else pool_->give(region->slots[i].chunk);
    region->slots[i].chunk = kNoChunk;
    region->slots[i].arriving = false;
  }
  region->moving -= piece.count;
  moving_ -= piece.count;
  if (region->doomed && region->moving == 0) dispose(region);
  changed_.notify_all();
  return false;
}

bool Core::settle(Lock& lock, const Transfer& transfer) {
  Region* region = transfer.region;
  if (order_) return settle_enqueued(lock, transfer);
  lock.unlock();
  bool copied = device_.wait(transfer.event, transfer.direction) == CUDA_SUCCESS && !transfer.failed;
  if (!copied && !device_.lost() && transfer.direction == Direction::kIn) {  // the data must come: once more, synchronously
    const bool again = copy_slots(region, transfer.first, transfer.count, Direction::kIn);
    copied = device_.wait(nullptr, Direction::kIn) == CUDA_SUCCESS && again;  // in any case: parts may be under way
  }
  lock.lock();
  if (!copied && device_.lost()) {
    abandon(transfer);
    changed_.notify_all();
    return false;
  }
  const bool out = transfer.direction == Direction::kOut;
  double& idle_since = out ? out_idle_since_ : in_idle_since_;  // copies of a direction do not overlap each other
  const double now = now_seconds();
  const double began = std::max(transfer.started, idle_since), seconds = std::max(0.0, now - began);
  (out ? stats_.copy_out_seconds : stats_.copy_in_seconds) += seconds;
  idle_since = std::max(idle_since, now);
  if (ooc_event* event = timeline_.at(transfer.watched)) {
    event->start = now - seconds;
    event->end = now;
  }
  return end_transition(transfer, copied);
}

bool Core::end_transition(const Transfer& transfer, bool copied) {
  Region* region = transfer.region;
  const bool out = transfer.direction == Direction::kOut;
  const uint64_t moved = out ? stats_.swap_out_bytes : stats_.swap_in_bytes, written_back = stats_.write_back_bytes;
  if (out) settle_out(transfer, copied);
  else copied = settle_in(transfer, copied);
  if (timeline_.on()) {
    if (ooc_event* event = timeline_.at(transfer.watched)) {
      event->bytes = (out ? stats_.swap_out_bytes : stats_.swap_in_bytes) - moved;
      if (stats_.write_back_bytes > written_back) event->flags |= OOC_EVENT_WRITE_BACK;
    }
    watch_memory(now_seconds());
  }
  region->moving -= transfer.count;
  moving_ -= transfer.count;
  if (region->doomed && region->moving == 0) dispose(region);
  changed_.notify_all();
  return copied;
}

void Core::settle_out(const Transfer& transfer, bool copied) {
  Region* region = transfer.region;
  const uint32_t end = transfer.first + transfer.count;
  for (uint32_t i = transfer.first; i < end; ++i) region->slots[i].leaving = false;
  if (!copied || region->doomed) return;
  stats_.swap_out_bytes += slot_bytes(region, transfer.first, transfer.count);
  ++stats_.swap_out_count;
  enum Outcome { kOverwritten, kStays, kPinned, kLeaves };
  const auto outcome = [region](uint32_t i) {
    const Slot& slot = region->slots[i];
    if (slot.overwritten || region->writable_pins > 0) return kOverwritten;
    return slot.staying ? kStays : region->pinned(i) ? kPinned : kLeaves;
  };
  for (uint32_t i = transfer.first, last = i; i < end; i = last) {
    const Outcome all = outcome(i);
    while (last < end && outcome(last) == all) ++last;
    for (uint32_t slot = i; slot < last; ++slot) region->slots[slot].staying = false;
    if (all == kOverwritten) {
      ++stats_.cancelled_swap_out_count;
      continue;
    }
    for (uint32_t slot = i; slot < last; ++slot) region->slots[slot].host_valid = true;
    region->host_valid += last - i;
    if (all == kStays) stats_.write_back_bytes += slot_bytes(region, i, last - i);
    else if (all == kPinned) ++stats_.cancelled_swap_out_count;  // somebody reads it: it stays, and is clean
    else unmap_slots(region, i, last - i);  // if the driver refuses, it stays, and is clean
  }
}

bool Core::settle_in(const Transfer& transfer, bool copied) {
  Region* region = transfer.region;
  for (uint32_t i = transfer.first; i < transfer.first + transfer.count; ++i) region->slots[i].arriving = false;
  region->resident += transfer.count;
  resident_chunks_ += transfer.count;
  if (!copied) {
    if (!unmap_slots(region, transfer.first, transfer.count))  // the host copy is still there
      forget_slots(region, transfer.first, transfer.count);
    return false;
  }
  if (region->doomed) return true;
  stats_.swap_in_bytes += slot_bytes(region, transfer.first, transfer.count);
  ++stats_.swap_in_count;
  return true;
}

}  // namespace ooc
