// What a scheduler asks of the core (scheduler.h).
#include <algorithm>

#include "core.h"
#include "own_memory.h"

namespace ooc {

void Core::set_scheduler(Scheduler* scheduler) {
  if (scheduler_ != nullptr) scheduler_counts_ = scheduler_->counts();
  scheduler_ = scheduler;
}

bool Core::may_move() const { return !paused_ && !detached_ && own_memory::ready(); }

void Core::bind_thread() {
  device_.bind_thread();
  // Queries of events would end the capture of another thread.
  device_.set_capture_mode(CU_STREAM_CAPTURE_MODE_RELAXED);
}

bool Core::move_out(Lock& lock, const Piece& piece, std::vector<Transfer>& transfers, bool stay) {
  return transitions_.start_out(lock, piece, transfers, stay);
}

bool Core::leaves(const Piece& piece) const {
  const auto& slots = piece.region->slots;
  for (uint32_t i = piece.first; i < std::min(piece.end(), piece.region->count); ++i)
    if (slots[i].state == SlotState::kLeaving) return true;
  return false;
}

Piece Core::next_absent(Region* region, uint32_t first, uint32_t end) const {
  return Transitions::next_absent(region, first, end, geometry_.piece_chunks);
}

bool Core::move_in(Lock& lock, const Piece& piece, std::vector<Transfer>& transfers) {
  std::vector<Chunk> chunks(piece.count);
  const bool taken = room_waiters_ == 0 && idle_.take(piece.count, chunks.data());
  idle_wanted_ = !taken;  // whoever frees a variable then wakes the scheduler
  if (taken) transitions_.start_in(lock, piece, chunks.data(), transfers);
  return taken;
}

}  // namespace ooc
