// Moves of a plan between host memory and the disk below it: blocks of whole variables, one at a time in each direction.
#include <algorithm>

#include "daemon.h"

namespace ooc {

// The copy out that fills the block is to come first, or still under way.
bool Daemon::waits_above(const Run& run, const Move& down, Region* region) const {
  if (region->moving > 0 || leaves_before(run, down, region)) return true;
  const auto& outs = run.plan->moves[kOut];
  for (size_t i = run.next[kOut]; i < outs.size() && outs[i].after_function <= down.after_function; ++i)
    if (outs[i].variable == down.variable) return true;
  return false;
}

// The block is to come up again already.
bool Daemon::is_late(const Run& run, const Move& down) const {
  const auto& ups = run.plan->moves[kUp];
  const auto up = std::ranges::find_if(ups, [&](const Move& move) {
    return move.variable == down.variable && move.after_function >= down.after_function;
  });
  return up != ups.end() && run.passed(up->after_function);
}

// A plan brings the region's block up now, as soon as there is room for it.
bool Daemon::comes_up(const Region* region) const {
  for (const auto& run : runs_) {
    const auto& ups = run->plan->moves[kUp];
    for (size_t i = run->next[kUp]; i < ups.size() && run->passed(ups[i].after_function); ++i)
      if (bound(*run, ups[i].variable) == region) return true;
  }
  return false;
}

bool Daemon::host_relief_coming(const Region* waiting) const {
  if (going_down_ != nullptr && going_down_ != waiting) return true;
  const auto run = may_start() && threads_[2].joinable() ? due_run(kDown) : nullptr;
  if (run == nullptr) return false;
  const Move& move = *run->next_move(kDown);
  Region* region = bound(*run, move.variable);
  return region != nullptr && region != waiting && !waits_above(*run, move, region);
}

void Daemon::go_on(Run& run, MoveKind kind) {
  ++run.next[kind];
  drop_finished_runs();
  changed_.notify_all();
}

bool Daemon::tick_down(Lock& lock) {
  const auto run = may_start() ? due_run(kDown) : nullptr;
  if (run == nullptr) return false;
  const Move move = *run->next_move(kDown);
  Region* region = bound(*run, move.variable);
  if (region != nullptr && !is_late(*run, move)) {
    if (waits_above(*run, move, region)) return false;
    going_down_ = region;
    core_.send_down(lock, region);
    going_down_ = nullptr;
  }
  go_on(*run, kDown);
  return true;
}

// What comes up waits for room; somebody who needs it at once makes it.
bool Daemon::tick_up(Lock& lock) {
  const auto run = may_start() ? due_run(kUp) : nullptr;
  if (run == nullptr) return false;
  Region* region = bound(*run, run->next_move(kUp)->variable);
  if (region != nullptr && core_.is_below(region) && !core_.bring_up(lock, region, false)) return false;
  go_on(*run, kUp);
  return true;
}

}  // namespace ooc
