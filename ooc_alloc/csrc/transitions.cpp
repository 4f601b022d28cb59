#include "transitions.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>
#include <tuple>

#include "audit_check.h"
#include "clock.h"

namespace ooc {

void Transitions::begin_moving(Region* region, uint32_t slots) {
  region->moving += slots;
  moving_ += slots;
}

void Transitions::end_moving(Region* region, uint32_t slots) {
  region->moving -= slots;
  moving_ -= slots;
  if (region->doomed && region->moving == 0) dispose(region);
  changed_.notify_all();
}

Transfer Transitions::begin_transfer(const Piece& piece, Direction direction) {
  begin_moving(piece.region, piece.count);
  Transfer transfer{piece.region, piece.first, piece.count, direction, now_seconds()};
  transfer.watched = with_.watch.copy(piece.region, direction, transfer.started, piece.on_demand);
  return transfer;
}

bool Transitions::enqueue(const Piece& piece, Direction direction) {
  char* device = with_.geometry.address(piece.region, piece.first);
  char* host = with_.host.address(piece.region, piece.first);
  uint64_t left = with_.geometry.bytes_in(piece.region, piece.first, piece.count);
  const uint64_t longest = with_.geometry.piece_chunks * with_.geometry.chunk_bytes;
  while (left > 0) {
    const uint64_t bytes = std::min({left, longest, with_.host.extent_left(host)});
    if (with_.device.copy(direction, device, host, bytes) != CUDA_SUCCESS) return false;
    device += bytes;
    host += bytes;
    left -= bytes;
  }
  return true;
}

// ---- leaving --------------------------------------------------------------------------------------------------------

bool Transitions::verify_clean(const Piece& piece) {
  const Moments users = Streams::users(piece.region, piece.first, piece.count);
  if (!with_.streams.host_waits(users, Edge::kUseBeforeOut)) return true;  // nothing can be said
  const uint64_t bytes = with_.geometry.bytes_in(piece.region, piece.first, piece.count);
  std::vector<char> now(bytes);
  const auto address = reinterpret_cast<CUdeviceptr>(with_.geometry.address(piece.region, piece.first));
  if (with_.device.driver().cuMemcpyDtoH(now.data(), address, bytes) != CUDA_SUCCESS) return true;  // here too
  return std::memcmp(now.data(), with_.host.address(piece.region, piece.first), bytes) == 0;
}

bool Transitions::drop_clean(const Piece& piece) {
  if (!with_.mappings.unmap(piece)) return false;
  counted_.clean_drop_bytes += with_.geometry.bytes_in(piece.region, piece.first, piece.count);
  ++counted_.clean_drop_count;
  with_.watch.dropped(piece);
  changed_.notify_all();
  return true;
}

Transfer Transitions::copy_out(Lock& lock, const Piece& piece, bool stay) {
  for (Slot& slot : piece.slots()) {
    slot.state = stay ? SlotState::kWritingBack : SlotState::kLeaving;
    slot.overwritten = false;
  }
  Transfer transfer = begin_transfer(piece, Direction::kOut);
  const Moments users = Streams::users(piece.region, piece.first, piece.count);
  const bool ordered = with_.streams.wait(StreamOrder::kOut, users, Edge::kUseBeforeOut);
  const StreamTimer::Start timed = with_.streams.start_copy(Direction::kOut);
  lock.unlock();
  transfer.failed = !ordered || !enqueue(piece, Direction::kOut);
  if (!with_.streams.on()) transfer.event = with_.device.record(Direction::kOut);
  lock.lock();
  transfer.moment = with_.streams.end_copy(Direction::kOut, timed, &counted_.copy_out_seconds, transfer.watched);
  return transfer;
}

bool Transitions::start_out(Lock& lock, const Piece& piece, std::vector<Transfer>& transfers, bool stay) {
  if (with_.device.lost()) return false;
  Region* region = piece.region;
  const uint32_t end = piece.end();
  for (uint32_t i = piece.first; i < end && i < region->count && region->live && region->pins == 0;) {
    Slot& slot = region->slots[i];
    if (!slot.at_rest() || slot.pins > 0 || (stay && slot.host_valid)) {
      // Its write-back is under way already; when the copy is made, the slot leaves after all.
      if (!stay && slot.pins == 0 && slot.state == SlotState::kWritingBack) slot.state = SlotState::kLeaving;
      ++i;
      continue;
    }
    uint32_t last = i;
    while (last < end && last < region->count && region->slots[last].at_rest() && region->slots[last].pins == 0 &&
           region->slots[last].host_valid == slot.host_valid)
      ++last;
    const Piece run{region, i, last - i, piece.on_demand};
    if (slot.host_valid && strict_ && !verify_clean(run)) {
      strict_failure_ = std::string("function ") + with_.iterations.recorder().function_name(region->last_function) +
                        " wrote a variable of " + std::to_string(region->bytes) +
                        " bytes that its schema declares as read only";
      with_.host.written(region, i, last - i);
      continue;
    }
    if (slot.host_valid) {
      if (!drop_clean(run)) return false;
    } else {
      if (!with_.host.ensure(region, !stay)) return false;
      transfers.push_back(copy_out(lock, run, stay));
    }
    i = last;
  }
  return true;
}

// ---- arriving -------------------------------------------------------------------------------------------------------

Piece Transitions::next_absent(Region* region, uint32_t first, uint32_t end, uint64_t most) {
  const auto& slots = region->slots;
  while (first < end && !slots[first].may_come()) ++first;
  const auto together = [&](uint32_t i) { return slots[i].may_come() && slots[i].blank() == slots[first].blank(); };
  uint32_t last = first;
  while (last < end && last - first < most && together(last)) ++last;
  return {region, first, last - first};
}

bool Transitions::start_in(Lock& lock, const Piece& piece, const Chunk* chunks, std::vector<Transfer>& transfers) {
  Region* region = piece.region;
  if (with_.device.lost()) {
    for (uint32_t i = 0; i < piece.count; ++i) with_.mappings.give(chunks[i], nullptr);
    return false;
  }
  const bool blank = region->slots[piece.first].blank();
  for (uint32_t i = 0; i < piece.count; ++i) region->slots[piece.first + i].put(chunks[i], SlotState::kArriving);
  Transfer transfer{};
  if (blank) begin_moving(region, piece.count);
  else transfer = begin_transfer(piece, Direction::kIn);
  Moments before = with_.mappings.take_users(chunks, piece.count);
  // What is not in order, or may still be in use at the address, is not mapped.
  const bool ordered = blank || with_.streams.wait_for_memory(StreamOrder::kIn, before);
  const bool vacant = ordered && with_.mappings.vacate(lock, piece) && with_.host.hide(piece);
  lock.unlock();
  const bool mapped = vacant && with_.mappings.map(piece, chunks) == CUDA_SUCCESS;
  StreamTimer::Start timed = nullptr;
  if (mapped && !blank) {
    transfer.started = now_seconds();  // the time of the calls above is counted by itself
    if (with_.streams.on()) {
      lock.lock();
      timed = with_.streams.start_copy(Direction::kIn);
      lock.unlock();
    }
    transfer.failed = !enqueue(piece, Direction::kIn);
    if (!with_.streams.on()) transfer.event = with_.device.record(Direction::kIn);
  }
  lock.lock();
  if (mapped && !blank) {
    transfer.moment = with_.streams.end_copy(Direction::kIn, timed, &counted_.copy_in_seconds, transfer.watched);
    transfers.push_back(transfer);
    if (piece.on_demand) {
      ++counted_.demand_swap_in_count;
      counted_.demand_swap_in_bytes += with_.geometry.bytes_in(region, piece.first, piece.count);
    }
    return true;
  }
  if (mapped) {
    for (Slot& slot : piece.slots()) slot.state = SlotState::kResident;
    with_.table.gained(region, piece.count);
    with_.streams.arrives(region, piece.first, piece.count, before);
  } else {
    if (ooc_event* event = with_.watch.event(transfer.watched)) event->end = event->start;  // it never began
    const auto after = with_.streams.on() ? std::make_shared<const Moments>(std::move(before)) : nullptr;
    for (Slot& slot : piece.slots()) {
      with_.mappings.give(slot.take(), after);
      if (blank) slot.state = SlotState::kBlank;
    }
  }
  end_moving(region, piece.count);
  if (blank) with_.watch.memory(now_seconds());
  return mapped;
}

// ---- room -----------------------------------------------------------------------------------------------------------

std::vector<Piece> Transitions::choose_victims(uint64_t chunks, bool clean_only, const Scheduler* scheduler) const {
  // A heap, as few of many are taken: the furthest next use first, and the oldest of those that are as far.
  std::vector<std::tuple<uint64_t, int64_t, Region*>> candidates;
  for (Region* region = with_.table.oldest(); region != nullptr; region = region->newer) {
    if (region->pins > 0 || region->resident == 0 || (region->moving > 0 && !region->in_ranges)) continue;
    const uint64_t next = scheduler != nullptr ? scheduler->next_use(region) : Scheduler::kUnknown;
    candidates.emplace_back(next, -static_cast<int64_t>(candidates.size()), region);
  }
  std::ranges::make_heap(candidates);
  const auto can_leave = [clean_only](const Slot& slot) {
    return slot.at_rest() && slot.pins == 0 && (slot.host_valid || !clean_only);
  };
  std::vector<Piece> victims;
  for (; chunks > 0 && !candidates.empty(); candidates.pop_back()) {
    std::ranges::pop_heap(candidates);
    Region* region = std::get<Region*>(candidates.back());
    for (uint32_t end = region->count; end > 0 && chunks > 0;) {
      if (!can_leave(region->slots[end - 1])) {
        --end;
        continue;
      }
      uint32_t first = end;
      while (first > 0 && end - first < chunks && can_leave(region->slots[first - 1])) --first;
      victims.push_back({region, first, end - first, true});
      chunks -= end - first;
      end = first;
    }
  }
  return victims;
}

bool Transitions::evict(Lock& lock, const std::vector<Piece>& victims) {
  const uint64_t moved = counted_.swap_out_bytes, dropped = counted_.clean_drop_bytes;
  std::vector<Transfer> transfers;
  bool started = true;
  for (const Piece& piece : victims) started &= start_out(lock, piece, transfers);
  for (const Transfer& transfer : transfers) settle(lock, transfer);
  counted_.demand_swap_out_bytes += counted_.swap_out_bytes - moved;
  return started || counted_.swap_out_bytes > moved || counted_.clean_drop_bytes > dropped;
}

// ---- the end of a transition ----------------------------------------------------------------------------------------

bool Transitions::settle(Lock& lock, const Transfer& transfer) {
  return with_.streams.on() ? settle_enqueued(lock, transfer) : settle_waited(lock, transfer);
}

// The copy is enqueued: whoever comes next waits for it on the device.
bool Transitions::settle_enqueued(Lock& lock, const Transfer& transfer) {
  const bool out = transfer.direction == Direction::kOut;
  bool copied = !transfer.failed;
  Moment moment = transfer.moment;
  if (!copied && !out && !with_.device.lost()) {  // the data must come: once more
    lock.unlock();
    copied = enqueue(transfer.slots(), Direction::kIn);
    lock.lock();
    moment = with_.streams.end_copy(Direction::kIn, nullptr, &counted_.copy_in_seconds, Timeline::kNoEvent);
  }
  if (out) transfer.region->order.out.add(moment);
  else with_.streams.arrives(transfer.region, transfer.first, transfer.count, moment);
  return end_transition(transfer, copied);
}

bool Transitions::settle_waited(Lock& lock, const Transfer& transfer) {
  Device& device = with_.device;
  lock.unlock();
  bool copied = device.wait(transfer.event, transfer.direction) == CUDA_SUCCESS && !transfer.failed;
  if (!copied && !device.lost() && transfer.direction == Direction::kIn) {  // the data must come: once more
    const bool again = enqueue(transfer.slots(), Direction::kIn);
    copied = device.wait(nullptr, Direction::kIn) == CUDA_SUCCESS && again;  // in any case: parts may be under way
  }
  lock.lock();
  if (!copied && device.lost()) {
    abandoned_.push_back(transfer);
    changed_.notify_all();
    return false;
  }
  const bool out = transfer.direction == Direction::kOut;
  double& idle_since = out ? out_idle_since_ : in_idle_since_;
  const double now = now_seconds();
  const double began = std::max(transfer.started, idle_since), seconds = std::max(0.0, now - began);
  (out ? counted_.copy_out_seconds : counted_.copy_in_seconds) += seconds;
  idle_since = std::max(idle_since, now);
  if (ooc_event* event = with_.watch.event(transfer.watched)) {
    event->start = now - seconds;
    event->end = now;
  }
  return end_transition(transfer, copied);
}

bool Transitions::end_transition(const Transfer& transfer, bool copied) {
  const bool out = transfer.direction == Direction::kOut;
  const uint64_t moved = out ? counted_.swap_out_bytes : counted_.swap_in_bytes;
  const uint64_t written_back = counted_.write_back_bytes;
  if (out) settle_out(transfer, copied);
  else copied = settle_in(transfer, copied);
  if (ooc_event* event = with_.watch.event(transfer.watched); event != nullptr && with_.watch.recording()) {
    event->bytes = (out ? counted_.swap_out_bytes : counted_.swap_in_bytes) - moved;
    if (counted_.write_back_bytes > written_back) event->flags |= OOC_EVENT_WRITE_BACK;
  }
  with_.watch.memory(now_seconds());
  end_moving(transfer.region, transfer.count);
  return copied;
}

void Transitions::settle_out(const Transfer& transfer, bool copied) {
  Region* region = transfer.region;
  enum Outcome { kNothing, kOverwritten, kStays, kPinned, kLeaves };
  const bool for_nothing = !copied || region->doomed;
  const auto outcome_of = [region, for_nothing](const Slot& slot) {
    if (for_nothing) return kNothing;
    if (slot.overwritten || region->writable_pins > 0) return kOverwritten;
    if (slot.state == SlotState::kWritingBack) return kStays;
    return region->pins > 0 || slot.pins > 0 ? kPinned : kLeaves;
  };
  if (!for_nothing) {
    counted_.swap_out_bytes += with_.geometry.bytes_in(region, transfer.first, transfer.count);
    ++counted_.swap_out_count;
  }
  each_run(transfer.slots(), outcome_of, [&](const Piece& run, Outcome outcome) {
    for (Slot& slot : run.slots()) slot.state = SlotState::kResident;
    if (outcome == kOverwritten) ++counted_.cancelled_swap_out_count;
    if (outcome == kNothing || outcome == kOverwritten) return true;
    with_.host.validate(run);
    if (outcome == kStays) counted_.write_back_bytes += with_.geometry.bytes_in(region, run.first, run.count);
    else if (outcome == kPinned) ++counted_.cancelled_swap_out_count;  // somebody reads it: it stays, and is clean
    else with_.mappings.unmap(run);                                    // if the driver refuses, it stays, and is clean
    return true;
  });
}

bool Transitions::settle_in(const Transfer& transfer, bool copied) {
  Region* region = transfer.region;
  for (Slot& slot : transfer.slots().slots()) slot.state = SlotState::kResident;
  with_.table.gained(region, transfer.count);
  if (!copied) {  // the host copy is still there
    if (!with_.mappings.unmap(transfer.slots())) with_.mappings.forget(transfer.slots());
    return false;
  }
  if (region->doomed) return true;
  counted_.swap_in_bytes += with_.geometry.bytes_in(region, transfer.first, transfer.count);
  ++counted_.swap_in_count;
  return true;
}

// ---- the end of a variable ------------------------------------------------------------------------------------------

void Transitions::release(Region* region) {
  if (region->moving > 0) region->doomed = true;
  else dispose(region);
}

void Transitions::dispose(Region* region) {
  region->doomed = false;
  with_.host.release(region);
  if (region->host_valid > 0 || region->in_ranges)
    for (Slot& slot : region->slots) {
      slot.host_valid = false;
      if (slot.blank()) slot.state = SlotState::kSwapped;
      slot.pins = slot.kept = 0;
    }
  region->host_valid = 0;
  if (region->fully_resident() || !with_.mappings.destroy(region)) with_.table.cache(region);
}

// ---- a device that does not end its work ----------------------------------------------------------------------------

bool Transitions::device_lost(Lock& lock) {
  Device& device = with_.device;
  // What was under way when the device was lost may need a little longer.
  constexpr int kAttempts = 30;
  const auto over = [this] { return with_.streams.on() ? with_.streams.all_over() : with_.device.idle(); };
  for (int attempt = 0; attempt < kAttempts && device.lost() && !over(); ++attempt) {
    lock.unlock();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    lock.lock();
  }
  if (!device.lost()) return false;
  if (!over()) return true;
  device.found();
  for (const Transfer& transfer : std::exchange(abandoned_, {})) {
    if (transfer.event != nullptr) device.recycle(transfer.event);
    end_transition(transfer, false);
  }
  return false;
}

void Transitions::abandon_device() {
  with_.device.destroy_copy_streams();
  for (const Transfer& transfer : std::exchange(abandoned_, {})) end_transition(transfer, false);
}

std::string Transitions::audit() const {
  AuditCheck check;
  uint64_t moving = 0;
  for (const Region& region : with_.table.all()) {
    uint64_t here = 0;
    for (const Slot& slot : region.slots) here += slot.moving() ? 1 : 0;
    check.equal("moving slots of a region", here, region.moving);
    if (region.live || region.doomed) moving += here;
  }
  check.equal("moving slots", moving, moving_);
  return check.text();
}

}  // namespace ooc
