#include "schedule.h"

#include <algorithm>
#include <utility>

namespace ooc_torch __attribute__((visibility("hidden"))) {

void Follower::follow(Schedule schedule) {
  leave(schedule.fingerprint);
  const uint64_t fingerprint = schedule.fingerprint;
  Schedule& followed = schedules_.emplace(fingerprint, std::move(schedule)).first->second;
  if (position_ == 0) alike_.push_back(&followed);
}

void Follower::leave(uint64_t fingerprint) {
  const auto known = schedules_.find(fingerprint);
  if (known == schedules_.end()) return;
  std::erase(alike_, &known->second);
  if (last_ == &known->second) last_ = nullptr;
  schedules_.erase(known);
}

Schedule* Follower::advance(uint32_t function) {
  const uint32_t at = position_++;
  std::erase_if(alike_, [&](const Schedule* schedule) {
    return at >= schedule->functions.size() || schedule->functions[at] != function;
  });
  if (alike_.empty()) return nullptr;
  return last_ = alike_.front();
}

void Follower::count_departure(std::optional<uint64_t> carried_out) {
  if (carried_out) {
    schedules_.at(*carried_out).departures = 0;
  } else if (last_ != nullptr && ++last_->departures >= kMostDepartures) {
    for (ScheduledDrop& drop : last_->drops) refuse(drop);
    leave(last_->fingerprint);
  }
}

std::optional<uint64_t> Follower::end_iteration(bool dropped) {
  std::optional<uint64_t> carried_out;
  for (Schedule* schedule : alike_) {
    if (position_ != schedule->functions.size()) continue;
    if (schedule->rehearsing) ++schedule->rehearsals;
    else if (!carried_out) carried_out = schedule->fingerprint;
  }
  if (dropped) count_departure(carried_out);
  alike_.clear();
  last_ = nullptr;
  position_ = 0;
  for (auto& [fingerprint, schedule] : schedules_) {
    bool open = false;
    for (ScheduledDrop& drop : schedule.drops) {
      if (drop.passed < kRehearsals && schedule.rehearsals >= kMostRehearsals) refuse(drop);
      open |= !drop.refused && drop.passed < kRehearsals;
    }
    schedule.rehearsing = open;
    alike_.push_back(&schedule);
  }
  return carried_out;
}

}  // namespace ooc_torch
