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

Run* Daemon::run_with_outs() {
  for (const auto& run : runs_) {
    if (run->next_out >= run->plan->outs.size()) continue;
    return run->passed(run->plan->outs[run->next_out].after_function) ? run.get() : nullptr;
  }
  return nullptr;
}

Run* Daemon::run_with_write_backs() {
  for (const auto& run : runs_) {
    if (run->next_write_back >= run->plan->write_backs.size()) continue;
    return run->passed(run->plan->write_backs[run->next_write_back].after_function) ? run.get() : nullptr;
  }
  return nullptr;
}

Run* Daemon::run_with_ins() {
  for (const auto& run : runs_) {
    if (run->next_in >= run->plan->ins.size()) continue;
    const Move& move = run->plan->ins[run->next_in];
    const bool due = run->ended || run->passed(move.after_function);
    return due && run->outs_done >= move.after_outs ? run.get() : nullptr;
  }
  return nullptr;
}

bool Daemon::relief_coming() const {
  if (!may_start() || !out_thread_.joinable()) return false;
  const auto frees = [](const InFlight& flying) { return !flying.stays; };
  return starting_out_ || std::any_of(flying_out_.begin(), flying_out_.end(), frees) || const_cast<Daemon*>(this)->run_with_outs() != nullptr;
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
    for (size_t i = earlier->next_out; i < earlier->plan->outs.size(); ++i) {
      const Move& out = earlier->plan->outs[i];
      if (bound(*earlier, out.variable) == region && overlap({out.first, out.count}, move)) return true;
    }
  }
  return false;
}

bool Daemon::start_piece_out(Lock& lock, Run& run) {
  const std::shared_ptr<Run> keep = *std::find_if(runs_.begin(), runs_.end(), [&](const auto& r) { return r.get() == &run; });
  const Move& move = run.plan->outs[run.next_out];
  Region* region = bound(run, move.variable);
  const uint32_t pieces = core_.piece_chunks();
  const bool stale = region != nullptr && used_since(run, move, region);
  const bool usable = region != nullptr && !stale && region->pins == 0 && move.first + out_offset_ < region->count;
  const uint32_t first = move.first + out_offset_;
  const uint32_t count = usable ? std::min({pieces, move.count - out_offset_, region->count - first}) : 0;
  out_offset_ += count;
  const bool last = !usable || out_offset_ >= move.count;
  if (last) {
    ++run.next_out;
    out_offset_ = 0;
  }
  std::vector<Transfer> transfers;
  starting_out_ = usable;
  if (usable) core_.move_out(lock, {region, first, count}, transfers, false);
  starting_out_ = false;
  for (const Transfer& transfer : transfers) flying_out_.push_back({transfer, keep, false, false});
  if (last) {
    if (flying_out_.empty()) {
      ++keep->outs_done;
      changed_.notify_all();
    } else {
      flying_out_.push_back({Transfer{}, keep, true, false});  // settles after all that was started before it
    }
  }
  return true;
}

// A piece of the next write-back, if nothing has used the variable since, nor uses it now. Whatever comes of it, no
// move waits for it.
void Daemon::start_write_back(Lock& lock, Run& run) {
  const Move& move = run.plan->write_backs[run.next_write_back];
  Region* region = bound(run, move.variable);
  const uint32_t first = move.first + write_back_offset_;
  const bool usable = region != nullptr && region->pins == 0 && first < region->count && !used_since(run, move, region);
  const uint32_t pieces = core_.piece_chunks();
  const uint32_t count = usable ? std::min({pieces, move.count - write_back_offset_, region->count - first}) : 0;
  write_back_offset_ += count;
  if (!usable || write_back_offset_ >= move.count) {
    ++run.next_write_back;
    write_back_offset_ = 0;
  }
  std::vector<Transfer> transfers;
  if (usable) core_.move_out(lock, {region, first, count}, transfers, true);
  for (const Transfer& transfer : transfers) flying_out_.push_back({transfer, nullptr, false, true});
}

bool Daemon::tick_out(Lock& lock) {
  if (flying_out_.size() < 2 * kDepth && may_start())
    if (Run* run = run_with_outs()) return start_piece_out(lock, *run);
  if (flying_out_.size() < kDepth && may_start()) {
    if (Run* run = run_with_write_backs()) {
      start_write_back(lock, *run);
      return true;
    }
  }
  if (flying_out_.empty()) return core_.bury_one(lock);
  const InFlight oldest = flying_out_.front();
  if (oldest.transfer.region != nullptr) core_.settle(lock, oldest.transfer);
  flying_out_.pop_front();
  if (oldest.last) ++oldest.run->outs_done;
  drop_finished_runs();
  changed_.notify_all();
  return true;
}

bool Daemon::start_piece_in(Lock& lock, Run& run) {
  const Move& move = run.plan->ins[run.next_in];
  Region* region = bound(run, move.variable);
  // Used in the next iteration already; or demand has seen to it.
  const bool late = run.ended ? region != nullptr && recorder_.seen(region, move.first, move.count)
                              : move.before_function < run.begun;
  const uint32_t end = region == nullptr ? 0 : std::min(move.first + move.count, region->count);
  const Piece piece = region == nullptr ? Piece{} : core_.next_absent(region, move.first + in_offset_, end);
  if (!late && region != nullptr && piece.count == 0 && leaves_before(run, move, region)) return false;
  if (late || piece.count == 0) {
    ++run.next_in;
    in_offset_ = 0;
    drop_finished_runs();
    return true;
  }
  std::vector<Transfer> transfers;
  const uint32_t offset = std::exchange(in_offset_, piece.end() - move.first);
  if (!core_.move_in(lock, piece, transfers)) {
    in_offset_ = offset;
    return false;
  }
  for (const Transfer& transfer : transfers) flying_in_.push_back({transfer, nullptr, false, false});
  return true;
}

bool Daemon::tick_in(Lock& lock) {
  if (flying_in_.size() < kDepth && may_start())
    if (Run* run = run_with_ins())
      if (start_piece_in(lock, *run)) return true;
  if (flying_in_.empty()) return false;
  const InFlight oldest = flying_in_.front();
  flying_in_.pop_front();
  core_.settle(lock, oldest.transfer);
  return true;
}

}  // namespace ooc
