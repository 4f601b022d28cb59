// Iterations that nobody ends: a sequence whose end is three times the same is a loop's. Whoever watches is told where one
// round of it ends. A look costs as much as the sequence is long, and each comes a quarter later than the last one, so
// that a function costs a comparison.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "recorder.h"

namespace ooc {

class Repeats {
 public:
  // Functions in a round of the loop in which the first `end` functions of the sequence end, at least `least`; 0: none.
  static uint32_t period(const Trace& trace, uint32_t end, uint32_t least) {
    const std::vector<uint64_t> reversed = shapes(trace, end);
    // The longest proper prefix that is a suffix as well, of each prefix: what is left is the prefix's period.
    std::vector<uint32_t> borders(end + 1, 0);
    for (uint32_t i = 1, border = 0, tries = 0; i < end; ++i) {
      while (border > 0 && reversed[i] != reversed[border]) border = borders[border];
      if (reversed[i] == reversed[border]) ++border;
      borders[i + 1] = border;
      const uint32_t round = (i + 1) / kRounds;  // which may be of many smaller ones that look alike
      if (round < least || (i + 1) % kRounds != 0 || round % (i + 1 - border) != 0) continue;
      if (same_variables(trace, end, round)) return round;
      if (++tries == kMostTries) return 0;
    }
    return 0;
  }
  // Of the last round before `end`, the number of functions after which the fewest bytes are allocated.
  static uint32_t quietest(const Trace& trace, uint32_t end, uint32_t period) {
    const auto last = static_cast<int32_t>(end) - 1, first = last - static_cast<int32_t>(period) + 1;
    std::vector<int64_t> changes(period + 1, 0);
    for (const Trace::Variable& variable : trace.variables) {
      const int32_t from = std::max(variable.born, first), to = std::min(variable.died, last + 1);
      if (from >= to) continue;
      changes[static_cast<size_t>(from - first)] += static_cast<int64_t>(variable.bytes);
      changes[static_cast<size_t>(to - first)] -= static_cast<int64_t>(variable.bytes);
    }
    int64_t live = 0, least = INT64_MAX;
    uint32_t after = end;
    for (uint32_t i = 0; i < period; ++i) {
      live += changes[i];
      if (live >= least) continue;
      least = live;
      after = end - period + i + 1;
    }
    return after;
  }

  // Called with `first` and `second` where a round ends, within a function, after which the iteration is to end.
  using Found = int (*)(void* first, void* second);
  void watch(Found found, void* first, void* second) {
    found_ = found;
    first_ = first;
    second_ = second;
    search();
  }
  bool watched() const { return found_ != nullptr; }

  // The number of the program's own functions at whose beginning somebody has to look. The last one has begun, and nothing
  // else. Where an iteration ends is told by them alone, as any of them may make something again before it.
  uint32_t next() const { return next_; }
  void look(const Trace& trace) {
    const uint32_t functions = trace.functions(), own = trace.own_functions();
    if (trace.overflow) {
      next_ = kNever;
    } else if (ends_at_ != 0) {
      const bool comparable = rounds_ > 1 && !asked_ && as_written_ && trace.as_written();
      if (comparable && trace.prefixes[functions - 2] != prefix_) lose(own);
      else ask(trace);
    } else if (const uint32_t found = period(trace, functions - 1, least_)) {
      period_ = found;
      ends_at_ = quietest(trace, functions - 1, found) + found - trace.remade;
      next_ = ends_at_;
      if (ends_at_ == own) ask(trace);
    } else {
      next_ = own + own / 4;
    }
  }
  // The iteration ended, whoever ended it.
  void ended(uint32_t functions) {
    if (!watched()) return;
    if (asked_) {
      ends_at_ = next_ = period_;
      ++rounds_;
    } else {
      others_ = std::max(others_, functions);
      search();
    }
    asked_ = false;
  }

 private:
  static constexpr uint32_t kRounds = 3, kFewest = 8, kFirstLook = 128, kAgain = 16, kMostTries = 64, kNever = UINT32_MAX;

  // What each function does, whatever the variables are, the last one first.
  static std::vector<uint64_t> shapes(const Trace& trace, uint32_t end) {
    std::vector<uint64_t> result(end);
    size_t use = 0;
    for (uint32_t f = 0; f < end; ++f) {
      uint64_t& shape = result[end - 1 - f] = trace.names[f];
      for (; use < trace.uses.size() && trace.uses[use].function == f; ++use) {
        const Trace::Use& u = trace.uses[use];
        shape = (shape ^ trace.variables[u.variable].bytes << 2 ^ u.access) * 0x9e3779b97f4a7c15ULL;
        shape ^= shape >> 29;
      }
    }
    return result;
  }
  // Layers of a network are alike, too, but each has weights of its own. So of the variables that a round finds, two
  // thirds are those of the round before, or were made in the round before as those were in the one before that.
  static bool same_variables(const Trace& trace, uint32_t end, uint32_t period) {
    const auto begin = [&](uint32_t function) {
      return std::lower_bound(trace.uses.begin(), trace.uses.end(), function,
                              [](const Trace::Use& use, uint32_t f) { return use.function < f; });
    };
    std::vector<uint32_t> same, other;
    const auto middle = begin(end - period);
    auto before = begin(end - 2 * period);
    for (auto use = middle; use != trace.uses.end() && use->function < end && before != middle; ++use, ++before) {
      const Trace::Variable& now = trace.variables[use->variable];
      const Trace::Variable& then = trace.variables[before->variable];
      if (now.born >= static_cast<int32_t>(end - period)) continue;
      const bool moved_on = now.born >= 0 && now.born == then.born + static_cast<int32_t>(period);
      (use->variable == before->variable || moved_on ? same : other).push_back(use->variable);
    }
    const auto distinct = [](std::vector<uint32_t>& variables) {
      std::sort(variables.begin(), variables.end());
      return std::unique(variables.begin(), variables.end()) - variables.begin();
    };
    return !same.empty() && 2 * distinct(other) <= distinct(same);
  }

  // Until the iteration has ended: it cannot while a kernel of many functions runs.
  void ask(const Trace& trace) {
    if (!asked_) {
      prefix_ = trace.functions() > 1 ? trace.prefixes[trace.functions() - 2] : 0;
      as_written_ = trace.as_written();
    }
    asked_ = true;
    next_ = trace.own_functions() + kAgain;
    found_(first_, second_);
  }
  // The loop is over, or it was one within the loop that is sought.
  void lose(uint32_t functions) {
    if (rounds_ <= kRounds) least_ = 2 * period_;
    search();
    next_ = std::max(next_, functions + functions / 4);
  }
  void search() {
    period_ = ends_at_ = rounds_ = 0;
    asked_ = false;
    next_ = watched() ? std::max(kFirstLook, 4 * std::min(others_, kNever / 8)) : kNever;
  }

  Found found_ = nullptr;
  void *first_ = nullptr, *second_ = nullptr;
  uint32_t next_ = kNever;
  uint32_t period_ = 0, ends_at_ = 0, rounds_ = 0;  // of the loop that was found; rounds that ended
  uint32_t least_ = kFewest;                         // functions of a round
  uint32_t others_ = 0;                              // functions of the longest iteration that somebody else ended
  uint64_t prefix_ = 0;                              // of the last round, without its last function
  bool as_written_ = false;                          // that round
  bool asked_ = false;                               // for the end of the iteration
};

}  // namespace ooc
