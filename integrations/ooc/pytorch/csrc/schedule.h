// Schedules: in which iterations which variables are dropped after which functions (swapd/recompute/schedule.py), and where
// in a schedule the recorded thread is.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <utility>
#include <vector>

namespace ooc_torch __attribute__((visibility("hidden"))) {

struct ScheduledDrop {
  uint32_t made_by, number;  // the function that allocated the variable, and which of its variables it is
  uint32_t after;            // it is dropped once this function has ended
  bool final;                // no function of the sequence uses it any more, so that a rehearsal does not wait for its next use
  bool fleeting;             // made again for another variable's sake, it is gone once that is made
  uint32_t passed = 0;       // rehearsals in which it was made again with the same bits
  bool refused = false;      // it never will be
};

struct Schedule {
  uint64_t fingerprint = 0;
  std::vector<uint32_t> functions;  // names of the iteration's functions, as the core numbers them
  std::vector<bool> kept;           // [functions]
  std::vector<ScheduledDrop> drops; // by `after`, ascending
  // Variables that stay though the program frees them, by made_by and number, each until the function before which they are
  // needed last has begun.
  std::map<std::pair<uint32_t, uint32_t>, uint32_t> lingers;
  bool makes_lingering(uint32_t function) const {
    const auto first = lingers.lower_bound({function, 0});
    return first != lingers.end() && first->first.first == function;
  }
  bool rehearsing = true;           // its drops are made again beside what is there, and compared
  uint32_t rehearsals = 0;
  uint32_t departures = 0;          // iterations in a row that dropped something and then were of another sequence
};

// Rehearsals that a drop has to pass, and how many iterations there are for them.
constexpr uint32_t kRehearsals = 2, kMostRehearsals = 6;
// After so many departures in a row a schedule ends: with it, the program runs other functions than without.
constexpr uint32_t kMostDepartures = 12;

class Follower {
 public:
  void follow(Schedule schedule);
  void leave(uint64_t fingerprint);
  void leave_all() {
    alike_.clear();
    last_ = nullptr;
    schedules_.clear();
  }
  bool any() const { return !schedules_.empty(); }
  // A function of the sequence begins. Gives the schedule that it is in, or null.
  Schedule* advance(uint32_t function);
  void take_back() { --position_; }
  // The functions of the iteration that have begun.
  uint32_t position() const { return position_; }
  // The drop failed a rehearsal, or could not be rehearsed.
  void refuse(ScheduledDrop& drop) {
    refused_ += drop.refused ? 0 : 1;
    drop.refused = true;
  }
  uint64_t refused() const { return refused_; }  // so far
  // The next iteration begins, after one in which something was dropped or not. Schedules whose drops have all been rehearsed
  // are carried out from now on. Gives the one that the iteration has carried out from its beginning to its end.
  std::optional<uint64_t> end_iteration(bool dropped);

 private:
  std::map<uint64_t, Schedule> schedules_;
  void count_departure(std::optional<uint64_t> carried_out);

  std::vector<Schedule*> alike_;  // begin as the iteration does
  Schedule* last_ = nullptr;      // that the iteration was in
  uint32_t position_ = 0;
  uint64_t refused_ = 0;
};

}  // namespace ooc_torch
