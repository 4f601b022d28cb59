// The end of transitions: copies are waited for, and slots take their new state; what is due of variables that were
// freed meanwhile, and of a device that does not end its work.
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <thread>

#include "clock.h"
#include "transitions.h"

namespace ooc {

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
    copied = enqueue_pieces(transfer.slots(), Direction::kIn);
    lock.lock();
    moment = with_.streams.end_copy(Direction::kIn, nullptr, &counted_.copy_in_seconds, Timeline::kNoEvent);
  }
  if (out) transfer.region->order.out.add(moment);
  else with_.streams.arrives(transfer.region, transfer.first, transfer.count, moment);
  return end_transition(lock, transfer, copied);
}

bool Transitions::arrives(const Transfer& transfer) {
  Device& device = with_.device;
  DiskQueue* disk = with_.host.disk();
  if (disk == nullptr) {
    const CUresult waited = device.wait(transfer.event, transfer.direction);  // in any case: parts may be under way
    return waited == CUDA_SUCCESS && !transfer.failed;
  }
  if (transfer.disk == nullptr) return false;
  constexpr double kGlance = 0.25;  // seconds; another thread may find the device lost
  const double until = now_seconds() + device.wait_limit();
  int error = ETIMEDOUT;
  while (error == ETIMEDOUT && !device.lost() && now_seconds() < until) error = disk->wait(*transfer.disk, kGlance);
  if (error == ETIMEDOUT && !device.lost())
    device.lose("the disk with OOC_DISK=" + with_.host.file()->folder() + " did not end a transfer within " +
                std::to_string(device.wait_limit()) + " seconds");
  return error == 0;
}

bool Transitions::settle_waited(Lock& lock, const Transfer& transfer) {
  Device& device = with_.device;
  lock.unlock();
  bool copied = arrives(transfer);
  if (!copied && !device.lost() && transfer.direction == Direction::kIn) {  // the data must come: once more
    Transfer again = transfer;
    enqueue(again);
    copied = arrives(again);
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
  return end_transition(lock, transfer, copied);
}

bool Transitions::end_transition(Lock& lock, const Transfer& transfer, bool copied) {
  const bool out = transfer.direction == Direction::kOut;
  const uint64_t moved = out ? counted_.swap_out_bytes : counted_.swap_in_bytes;
  const uint64_t written_back = counted_.write_back_bytes;
  if (out) settle_out(lock, transfer, copied);
  else copied = settle_in(transfer, copied);
  if (ooc_event* event = with_.watch.event(transfer.watched); event != nullptr && with_.watch.recording()) {
    event->bytes = (out ? counted_.swap_out_bytes : counted_.swap_in_bytes) - moved;
    if (counted_.write_back_bytes > written_back) event->flags |= OOC_EVENT_WRITE_BACK;
  }
  with_.watch.memory(now_seconds());
  end_moving(transfer.region, transfer.count);
  return copied;
}

void Transitions::settle_out(Lock& lock, const Transfer& transfer, bool copied) {
  Region* region = transfer.region;
  enum Outcome { kNothing, kOverwritten, kStays, kPinned, kLeaves };
  const auto for_nothing = [region, copied] { return !copied || region->doomed; };
  const auto outcome_of = [region, for_nothing](const Slot& slot) {
    if (for_nothing()) return kNothing;
    if (slot.overwritten || region->writable_pins > 0) return kOverwritten;
    if (slot.state == SlotState::kWritingBack) return kStays;
    return region->pins > 0 || slot.pins > 0 ? kPinned : kLeaves;
  };
  if (!for_nothing()) {
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
    else with_.mappings.unmap(lock, run);                              // if the driver refuses, it stays, and is clean
    return true;
  });
}

bool Transitions::settle_in(const Transfer& transfer, bool copied) {
  Region* region = transfer.region;
  const Piece arrived = transfer.slots();
  for (Slot& slot : arrived.slots()) slot.state = SlotState::kResident;
  with_.table.gained(region, transfer.count);
  if (!copied) {  // the host copy is still there
    if (!with_.mappings.unmap(arrived)) with_.mappings.forget(arrived);
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
  if (region->host_valid > 0 || region->in_ranges || !region->fully_resident())
    for (Slot& slot : region->slots) {
      slot.host_valid = false;
      if (slot.blank()) slot.state = SlotState::kSwapped;
      slot.pins = slot.kept = 0;
    }
  region->host_valid = 0;
  with_.streams.end_variable(region);
  if (region->fully_resident() || !with_.mappings.destroy(region)) with_.table.cache(region);
}

// ---- a device that does not end its work ----------------------------------------------------------------------------

bool Transitions::device_lost(Lock& lock) {
  Device& device = with_.device;
  // What was under way when the device was lost may need a little longer.
  constexpr int kAttempts = 30;
  const auto over = [this] {
    if (!with_.host.disk_idle()) return false;
    return with_.streams.on() ? with_.streams.all_over() : with_.device.idle();
  };
  for (int attempt = 0; attempt < kAttempts && device.lost() && !over(); ++attempt) {
    lock.unlock();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    lock.lock();
  }
  if (!device.lost()) return false;
  if (!over()) return true;
  device.found();
  with_.host.end_stalled();
  for (const Transfer& transfer : std::exchange(abandoned_, {})) {
    if (transfer.event != nullptr) device.recycle(transfer.event);
    end_transition(lock, transfer, false);
  }
  return false;
}

void Transitions::abandon_device(Lock& lock) {
  with_.device.destroy_copy_streams();
  for (const Transfer& transfer : std::exchange(abandoned_, {})) end_transition(lock, transfer, false);
}

}  // namespace ooc
