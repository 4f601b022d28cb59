// What a plan lets happen now: its moves, piece by piece.
#include <algorithm>
#include <utility>

#include "daemon.h"

namespace ooc {
namespace {

bool overlap(Trace::Range one, const Move& move) {
  return one.first < move.first + move.count && (move.first < one.first || move.first - one.first < one.count);
}

}  // namespace

// The oldest run with a move of the kind left, if that move is due.
std::shared_ptr<Run> Daemon::due_run(MoveKind kind) const {
  for (const auto& run : runs_) {
    const Move* move = run->next_move(kind);
    if (move == nullptr) continue;
    const bool due = (kind == kIn && run->ended) || run->passed(move->after_function);
    return due && run->outs_done >= move->after_outs ? run : nullptr;
  }
  return nullptr;
}

bool Daemon::relief_coming() const {
  if (!may_start() || !runs()) return false;
  const auto frees = [](const InFlight& flying) { return !flying.stays; };
  return starting_out_ || std::any_of(flying_out_.begin(), flying_out_.end(), frees) || due_run(kOut) != nullptr;
}

void Daemon::drop_finished_runs() {
  while (!runs_.empty() && runs_.front()->ended && runs_.front()->finished()) runs_.pop_front();
}

// Too late to be worth it: what the move takes was used again after the function that it waits for, or is about to be.
bool Daemon::used_since(const Run& run, const Move& move, const Region* region) const {
  if (&run != current_.get()) return recorder_.seen(region, move.first, move.count);
  const auto& uses = run.plan->uses[move.variable];
  const auto after = static_cast<uint32_t>(move.after_function + 1);
  for (auto use = run.plan->first_use(move.variable, after); use != uses.end(); ++use) {
    if (use->function >= run.begun) return false;
    if (overlap(use->range, move)) return true;
  }
  return false;
}

// A run before this one is still to move some of these chunks out.
bool Daemon::leaves_before(const Run& run, const Move& move, Region* region) const {
  if (core_.leaves({region, move.first, move.count})) return true;
  for (const auto& earlier : runs_) {
    if (earlier.get() == &run) return false;
    const auto& outs = earlier->plan->moves[kOut];
    for (size_t i = earlier->next[kOut]; i < outs.size(); ++i) {
      const Move& out = outs[i];
      if (bound(*earlier, out.variable) == region && overlap({out.first, out.count}, move)) return true;
    }
  }
  return false;
}

// A piece of the next swap-out or write-back, if nothing has used the variable since, nor uses it now. No move waits
// for what comes of a write-back. Returns false if what is under way is to be settled first: it holds host memory.
bool Daemon::start_piece_out(Lock& lock, const std::shared_ptr<Run>& run, MoveKind kind) {
  const bool stays = kind == kWriteBack;
  const Move& move = *run->next_move(kind);
  Region* region = bound(*run, move.variable);
  const uint32_t first = move.first + offset_[kind];
  const bool usable =
      region != nullptr && region->pins == 0 && first < region->count && !used_since(*run, move, region);
  const uint32_t count =
      usable ? std::min({core_.piece_chunks(), move.count - offset_[kind], region->count - first}) : 0;
  if (count > 0 && !flying_out_.empty() && !core_.has_host_memory(region)) return false;
  offset_[kind] += count;
  const bool last = !usable || offset_[kind] >= move.count;
  if (last) {
    ++run->next[kind];
    offset_[kind] = 0;
  }
  std::vector<Transfer> transfers;
  starting_out_ = usable && !stays;
  if (usable) core_.move_out(lock, {region, first, count}, transfers, stays);
  starting_out_ = false;
  for (const Transfer& transfer : transfers) flying_out_.push_back({transfer, run, false, stays});
  if (!last || stays) return true;
  if (flying_out_.empty()) {
    ++run->outs_done;
    changed_.notify_all();
  } else {
    flying_out_.push_back({Transfer{}, run, true, false});  // settles after all that was started before it
  }
  return true;
}

bool Daemon::starts_out() const { return may_start() && (due_run(kOut) != nullptr || due_run(kWriteBack) != nullptr); }

bool Daemon::tick_out(Lock& lock) {
  for (const auto& [kind, depth] : {std::pair{kOut, 2 * kDepth}, std::pair{kWriteBack, kDepth}}) {
    const auto run = flying_out_.size() < depth && may_start() ? due_run(kind) : nullptr;
    if (run != nullptr && start_piece_out(lock, run, kind)) return true;
  }
  // Who told of a move that is due while the lock was given up to pin found nobody waiting.
  if (flying_out_.empty()) return core_.bury_one(lock) || core_.pin_ahead(lock) || starts_out();
  const InFlight oldest = flying_out_.front();
  if (oldest.transfer.region != nullptr) core_.settle(lock, oldest.transfer);
  flying_out_.pop_front();
  if (oldest.last) ++oldest.run->outs_done;
  drop_finished_runs();
  changed_.notify_all();
  return true;
}

bool Daemon::start_piece_in(Lock& lock, const std::shared_ptr<Run>& shared) {
  Run& run = *shared;
  const Move& move = *run.next_move(kIn);
  Region* region = bound(run, move.variable);
  // Used in the next iteration already; or demand has seen to it.
  const bool late = run.ended ? region != nullptr && recorder_.seen(region, move.first, move.count)
                              : move.before_function < run.begun;
  const uint32_t end = region == nullptr ? 0 : std::min(move.first + move.count, region->count);
  const Piece piece = region == nullptr ? Piece{} : core_.next_absent(region, move.first + offset_[kIn], end);
  if (!late && region != nullptr && piece.count == 0 && leaves_before(run, move, region)) return false;
  if (late || piece.count == 0) {
    ++run.next[kIn];
    offset_[kIn] = 0;
    drop_finished_runs();
    return true;
  }
  if (core_.is_below(region)) return flying_in_.empty() && !comes_up(region) && core_.bring_up(lock, region, true);
  std::vector<Transfer> transfers;
  const uint32_t offset = std::exchange(offset_[kIn], piece.end() - move.first);
  if (!core_.move_in(lock, piece, transfers)) {
    offset_[kIn] = offset;
    return false;
  }
  for (const Transfer& transfer : transfers) flying_in_.push_back({transfer, shared, false, false});
  return true;
}

bool Daemon::tick_in(Lock& lock) {
  if (flying_in_.size() < kDepth && may_start())
    if (const auto run = due_run(kIn))
      if (start_piece_in(lock, run)) return true;
  if (flying_in_.empty()) return false;
  const InFlight oldest = flying_in_.front();
  flying_in_.pop_front();
  const RegionHandle handle{oldest.transfer.region, oldest.transfer.region->generation};
  core_.settle(lock, oldest.transfer);
  if (oldest.run->plan->exclusive && handle.get() != nullptr) core_.drop_copies(handle.region);
  return true;
}

}  // namespace ooc
