// The swap daemon: carries out plans. It follows the recorded sequence function by function; two threads, one for each
// direction, move the planned pieces as soon as the plan lets them. It is never trusted: a function that finds a
// variable missing brings it in itself, and a departure from the sequence only ends the plan.
//
//   Plan   what to move, for iterations with one fingerprint (semantics: swapd/planning/plan.py)
//   Run    one iteration under a plan: progress, bindings of variables to regions, next moves
//
// An ended iteration's last moves go on into the next one, so runs are a queue: the oldest first.
#pragma once

#include <algorithm>
#include <array>
#include <condition_variable>
#include <deque>
#include <memory>
#include <thread>
#include <unordered_map>
#include <vector>

#include "ooc_alloc.h"
#include "scheduler.h"

namespace ooc {

enum MoveKind : size_t { kOut, kIn, kWriteBack, kDown, kUp, kMoveKinds };

struct Move {
  uint32_t variable = 0, first = 0, count = 0;  // chunks
  int32_t after_function = -1;                  // may start when this function has ended; -1: at once
  uint32_t after_outs = 0;                      // ins: and when so many outs of the plan are complete
  uint32_t before_function = 0;                 // ins: the function that needs it
};

struct Plan {
  uint64_t fingerprint = 0;
  std::array<std::vector<Move>, kMoveKinds> moves;  // of each kind, in the plan's order
  std::shared_ptr<const Trace> trace;           // the recorded iteration it was made for
  struct Use {
    uint32_t function;
    Trace::Range range;
  };
  std::vector<std::vector<Use>> uses;           // [variables] by function, ascending
  struct Turn {  // a function writes to the variable, or a swap-out takes it
    uint32_t function;
    size_t out;  // kWritten, or its number among the swap-outs
    static constexpr size_t kWritten = SIZE_MAX;
  };
  std::vector<std::vector<Turn>> turns;         // [variables] in the order in which they come
  std::vector<int32_t> next_id;                 // [variables] its id in the next iteration if that is the same; -1
  std::vector<bool> wakes;                      // [functions] its start lets a move begin
  bool exclusive = false;                       // what came in has no host copy any more

  // The first use of a variable that is not before a function.
  std::vector<Use>::const_iterator first_use(size_t variable, uint32_t function) const {
    return std::lower_bound(uses[variable].begin(), uses[variable].end(), function,
                            [](const Use& use, uint32_t value) { return use.function < value; });
  }
};

struct Run {
  std::shared_ptr<const Plan> plan;
  std::vector<RegionHandle> bindings;  // [variables]; of entry variables beforehand, of all once the iteration ended
  uint32_t begun = 0;                  // functions begun
  bool ended = false;
  bool successor_began = false;        // a function of the next iteration has begun
  bool expected = false;               // history said that this plan would be followed
  std::array<size_t, kMoveKinds> next{};  // moves of each kind that were started, the last perhaps in part
  size_t outs_done = 0;

  bool passed(int32_t after_function) const {  // the function after `after_function` has begun
    return after_function < 0 || begun >= static_cast<uint32_t>(after_function) + 2 || (ended && successor_began);
  }
  // The next move of a kind; null if there is none left.
  const Move* next_move(MoveKind kind) const {
    return next[kind] < plan->moves[kind].size() ? &plan->moves[kind][next[kind]] : nullptr;
  }
  bool finished() const {
    for (size_t kind = 0; kind < kMoveKinds; ++kind)
      if (next_move(static_cast<MoveKind>(kind)) != nullptr) return false;
    return true;
  }
};

class Daemon : public Scheduler {
 public:
  // Starts the threads if asked; stops and joins them in the destructor or in stop().
  Daemon(Mover& core, bool start_threads);
  ~Daemon() override;
  void stop();
  // Waits until the threads have done all that the plan lets them do now (replays and tests that compare residency).
  void settle();

  // Takes the core's lock. Returns false if no trace with the fingerprint is kept, or a move names what is not in it.
  bool install(const ooc_plan& plan);
  void forget();
  bool has_plan(uint64_t fingerprint);

  // Scheduler
  void function_started(uint32_t index, uint64_t prefix) override;
  bool iteration_ended(const std::shared_ptr<Trace>& ended) override;
  bool relief_coming() const override;
  bool host_relief_coming(const Region* waiting) const override;
  bool copies_outlast(const Region* region) const override;
  uint64_t next_use(const Region* region) const override;
  Counts counts() const override { return counts_; }
  bool waits_for_last_function() const override {
    return current_ && current_->begun < current_->plan->wakes.size() && current_->plan->wakes[current_->begun];
  }

  // One step of a direction's thread: starts or settles a piece. Returns false if there is nothing to do now. For tests
  // without threads.
  bool tick_out(Lock& lock);
  bool tick_in(Lock& lock);
  // The same between host memory and the disk below it: a whole block at a time, which is waited for (lower_tier.cpp).
  bool tick_down(Lock& lock);
  bool tick_up(Lock& lock);

 private:
  bool runs() const { return threads_[0].joinable() && threads_[1].joinable(); }
  void join();
  void serve(size_t direction, bool (Daemon::*tick)(Lock&));
  void follow(std::shared_ptr<const Plan> plan, uint32_t begun, bool expected);
  void depart();
  void drop_old_tails();
  std::shared_ptr<const Plan> plan_with_prefix(uint32_t index, uint64_t prefix) const;
  std::shared_ptr<Run> due_run(MoveKind kind) const;
  void drop_finished_runs();
  bool may_start() const { return !stop_ && core_.may_move(); }
  Region* bound(const Run& run, uint32_t variable) const;
  bool used_since(const Run& run, const Move& move, const Region* region) const;
  bool leaves_before(const Run& run, const Move& move, Region* region) const;
  bool starts_out() const;
  bool start_piece_out(Lock& lock, const std::shared_ptr<Run>& run, MoveKind kind);
  bool start_piece_in(Lock& lock, const std::shared_ptr<Run>& shared);
  bool waits_above(const Run& run, const Move& down, Region* region) const;
  bool is_late(const Run& run, const Move& down) const;
  bool comes_up(const Region* region) const;
  void go_on(Run& run, MoveKind kind);

  static constexpr size_t kDepth = 2;  // pieces in flight: one is copied while the next is prepared

  Mover& core_;
  const Recorder& recorder_;
  std::condition_variable& changed_;
  std::unordered_map<uint64_t, std::shared_ptr<const Plan>> plans_;
  std::deque<uint64_t> recent_;                          // fingerprints of plans, most recently followed first
  std::unordered_map<uint64_t, uint64_t> successors_;    // fingerprint -> the one that came next, last time
  Counts counts_;
  uint64_t last_fingerprint_ = 0;
  std::deque<std::shared_ptr<Run>> runs_;                // oldest first
  std::shared_ptr<Run> current_;                         // of the iteration under way, or null
  bool followed_from_start_ = false;
  bool departed_ = false;                                // from the expected sequence; counts if the iteration ends

  struct InFlight {
    Transfer transfer;
    std::shared_ptr<Run> run;
    bool last = false;  // of its move
    bool stays = false; // a write-back: no room comes of it
  };
  std::deque<InFlight> flying_out_, flying_in_;
  const Region* going_down_ = nullptr;  // by a plan, at this moment
  bool starting_out_ = false;  // a swap-out is begun, without the lock: it is neither waiting nor in flight
  std::array<uint32_t, kMoveKinds> offset_{};  // chunks of the next move of each kind that were already started
  bool stop_ = false;
  uint64_t rounds_asked_ = 0, rounds_seen_[4] = {};  // settle(): a thread that has seen a round had nothing to do in it
  uint64_t work_done_ = 0;                               // ticks that did something
  std::thread threads_[4];                               // out, in, down, up; the last two where there are three tiers
};

}  // namespace ooc
