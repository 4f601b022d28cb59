#include "transitions.h"

#include <algorithm>
#include <tuple>
#include <utility>

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

void Transitions::enqueue(Transfer& transfer) {
  if (with_.host.disk() != nullptr) {
    transfer.disk = with_.host.start(transfer.direction, transfer.slots());
    return;
  }
  transfer.failed = !enqueue_pieces(transfer.slots(), transfer.direction);
  if (!with_.streams.on()) transfer.event = with_.device.record(transfer.direction);
}

bool Transitions::enqueue_pieces(const Piece& piece, Direction direction) {
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
  std::vector<char> now(DiskFile::whole_pages(bytes));
  const auto address = reinterpret_cast<CUdeviceptr>(with_.geometry.address(piece.region, piece.first));
  if (with_.device.driver().cuMemcpyDtoH(now.data(), address, now.size()) != CUDA_SUCCESS) return true;  // here too
  return with_.host.agrees(piece, now.data());
}

bool Transitions::drop_clean(Lock& lock, const Piece& piece) {
  begin_moving(piece.region, piece.count);
  const bool dropped = with_.mappings.unmap(lock, piece);
  if (dropped) {
    counted_.clean_drop_bytes += with_.geometry.bytes_in(piece.region, piece.first, piece.count);
    ++counted_.clean_drop_count;
    with_.watch.dropped(piece);
  }
  end_moving(piece.region, piece.count);
  return dropped;
}

Transfer Transitions::copy_out(Lock& lock, const Piece& piece, bool stay) {
  with_.host.begin_write(piece.region);
  for (Slot& slot : piece.slots()) {
    slot.state = stay ? SlotState::kWritingBack : SlotState::kLeaving;
    slot.overwritten = false;
  }
  Transfer transfer = begin_transfer(piece, Direction::kOut);
  const Moments users = Streams::users(piece.region, piece.first, piece.count);
  const bool ordered = with_.streams.wait(StreamOrder::kOut, users, Edge::kUseBeforeOut);
  const StreamTimer::Start timed = with_.streams.start_copy(Direction::kOut);
  lock.unlock();
  transfer.failed = !ordered;
  if (ordered) enqueue(transfer);
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
    if (slot.host_valid ? strict_ && with_.host.is_below(region) : region->host == nullptr) {
      const RegionHandle handle{region, region->generation};
      if (!with_.host.ensure(lock, region, !stay)) return false;
      if (handle.get() == nullptr) return true;
      if (with_.host.tiered()) continue;  // the lock was given up: what is there now?
    }
    if (slot.host_valid && strict_ && !verify_clean(run)) {
      strict_failure_ = std::string("function ") + with_.iterations.recorder().function_name(region->last_function) +
                        " wrote a variable of " + std::to_string(region->bytes) +
                        " bytes that its schema declares as read only";
      with_.host.written(region, i, last - i);
      continue;
    }
    if (slot.host_valid) {
      if (!drop_clean(lock, run)) return false;
    } else {
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
    enqueue(transfer);
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
    uint64_t next = scheduler != nullptr ? scheduler->next_use(region) : Scheduler::kUnknown;
    if (!with_.host.can_hold(region)) next = 0;  // asked last, and only to say why it stays
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
  const auto settle_all = [&] {
    for (const Transfer& transfer : std::exchange(transfers, {})) settle(lock, transfer);
  };
  for (const Piece& piece : victims) {
    const bool may_leave = piece.region->live && piece.region->pins == 0;
    if (!transfers.empty() && may_leave && with_.host.tiered() && !with_.host.ensure_at_once(piece.region)) settle_all();
    started &= start_out(lock, piece, transfers);
  }
  settle_all();
  counted_.demand_swap_out_bytes += counted_.swap_out_bytes - moved;
  return started || counted_.swap_out_bytes > moved || counted_.clean_drop_bytes > dropped;
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
