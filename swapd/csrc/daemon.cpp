#include "daemon.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <exception>

#include "block_signals.h"

namespace ooc {
namespace {

// Throws if the system has no thread to give.
template <class Body>
std::thread thread_without_signals(const char* name, Body body) {
  const BlockSignals blocked;
  std::thread thread(body);
  pthread_setname_np(thread.native_handle(), name);
  return thread;
}

}  // namespace

Daemon::Daemon(Mover& core, bool start_threads)
    : core_(core), recorder_(core.recorder()), changed_(core.changed()) {
  Lock lock(core_.mutex());
  core_.set_scheduler(this);
  if (!start_threads) return;
  try {
    threads_[0] = thread_without_signals("ooc-swap-out", [this] { serve(0, &Daemon::tick_out); });
    threads_[1] = thread_without_signals("ooc-swap-in", [this] { serve(1, &Daemon::tick_in); });
    if (core_.tiered()) {
      threads_[2] = thread_without_signals("ooc-swap-down", [this] { serve(2, &Daemon::tick_down); });
      threads_[3] = thread_without_signals("ooc-swap-up", [this] { serve(3, &Daemon::tick_up); });
    }
  } catch (const std::exception& error) {  // one direction alone would fill the device, or the host
    std::fprintf(stderr, "ooc_alloc: the system gives no thread for the swap daemon (%s): variables move on demand alone\n",
                 error.what());
    stop_ = true;
    changed_.notify_all();
    lock.unlock();
    join();
    lock.lock();
    stop_ = false;
  }
}

Daemon::~Daemon() { stop(); }

void Daemon::stop() {
  {
    Lock lock(core_.mutex());
    if (core_.forked()) {  // the threads are the parent's
      for (std::thread& thread : threads_)
        if (thread.joinable()) thread.detach();
      return;
    }
    core_.set_scheduler(nullptr);
    stop_ = true;
    runs_.clear();
    current_.reset();
    changed_.notify_all();
  }
  join();
}

void Daemon::join() {
  for (std::thread& thread : threads_)
    if (thread.joinable()) thread.join();
}

void Daemon::serve(size_t direction, bool (Daemon::*tick)(Lock&)) {
  core_.bind_thread();
  Lock lock(core_.mutex());
  while (true) {
    const uint64_t round = rounds_asked_;
    if ((this->*tick)(lock)) {
      ++work_done_;
      continue;
    }
    if (stop_) return;
    if (rounds_seen_[direction] != round) {
      rounds_seen_[direction] = round;
      changed_.notify_all();
    }
    if (rounds_asked_ != round) continue;
    if (direction < 2) changed_.wait(lock);
    else changed_.wait_for(lock, std::chrono::milliseconds(due_run(direction == 2 ? kDown : kUp) ? 1 : 1000));
  }
}

// Work of one direction can make some for the other: over when a whole round of both did nothing.
void Daemon::settle() {
  Lock lock(core_.mutex());
  // Without threads nothing is under way; those of a forked child are its parent's.
  if (core_.forked() || !runs()) return;
  const auto seen = [this](uint64_t round) {
    for (size_t i = 0; i < std::size(threads_); ++i)
      if (threads_[i].joinable() && rounds_seen_[i] < round) return false;
    return true;
  };
  uint64_t before = 0;
  do {
    before = work_done_;
    const uint64_t round = ++rounds_asked_;
    changed_.notify_all();
    changed_.wait(lock, [&] { return stop_ || seen(round); });
  } while (!stop_ && work_done_ != before);
}

// ---- plans ----------------------------------------------------------------------------------------------------------

bool Daemon::install(const ooc_plan& source) {
  Lock lock(core_.mutex());
  auto plan = std::make_shared<Plan>();
  plan->fingerprint = source.fingerprint;
  plan->trace = core_.trace(source.fingerprint);
  if (!plan->trace) return false;
  const Trace& trace = *plan->trace;
  const size_t variables = trace.variables.size();
  const auto number = [](const int32_t* values, uint32_t i) {
    return values != nullptr ? static_cast<uint32_t>(std::max(values[i], 0)) : 0;
  };
  const auto add = [&](MoveKind kind, uint32_t count, const int32_t* variable, const int32_t* first,
                       const int32_t* chunks, const int32_t* after, const int32_t* after_outs = nullptr,
                       const int32_t* before = nullptr) {
    for (uint32_t i = 0; i < count; ++i)
      plan->moves[kind].push_back({number(variable, i), number(first, i), number(chunks, i), after[i],
                                   number(after_outs, i), number(before, i)});
  };
  add(kOut, source.outs, source.out_variable, source.out_first_chunk, source.out_chunk_count,
      source.out_after_function);
  add(kIn, source.ins, source.in_variable, source.in_first_chunk, source.in_chunk_count, source.in_after_function,
      source.in_after_outs, source.in_before_function);
  add(kWriteBack, source.write_backs, source.back_variable, source.back_first_chunk, source.back_chunk_count,
      source.back_after_function);
  const std::vector<int32_t> all(std::max(source.downs, source.ups), INT32_MAX);
  add(kDown, source.downs, source.down_variable, nullptr, all.data(), source.down_after_function);
  add(kUp, source.ups, source.up_variable, nullptr, all.data(), source.up_after_function);
  plan->exclusive = source.exclusive != 0;
  plan->wakes.assign(trace.functions() + 1, false);
  plan->wakes[0] = true;  // the tail of the run before
  for (const auto& moves : plan->moves)
    for (const Move& move : moves) {
      if (move.variable >= variables || move.after_function >= static_cast<int32_t>(trace.functions())) return false;
      if (move.after_function >= -1) plan->wakes[static_cast<size_t>(move.after_function + 1)] = true;
    }
  plan->uses.resize(variables);
  plan->turns.resize(variables);
  for (const Trace::Use& use : trace.uses) {
    plan->uses[use.variable].push_back({use.function, trace.range(use)});
    if ((use.access & OOC_WRITE) && use.range == 0) plan->turns[use.variable].push_back({use.function, Plan::Turn::kWritten});
  }
  for (size_t i = 0; i < plan->moves[kOut].size(); ++i) {
    const Move& out = plan->moves[kOut][i];
    auto& turns = plan->turns[out.variable];
    const auto later = [&](const Plan::Turn& turn) { return static_cast<int64_t>(turn.function) > out.after_function; };
    turns.insert(std::ranges::find_if(turns, later), {static_cast<uint32_t>(out.after_function + 1), i});
  }
  plan->next_id.assign(variables, -1);
  for (size_t v = 0; v < variables; ++v) {
    const int32_t previous = trace.variables[v].previous;
    if (previous >= 0 && static_cast<size_t>(previous) < variables) plan->next_id[static_cast<size_t>(previous)] = static_cast<int32_t>(v);
  }
  plans_[plan->fingerprint] = plan;
  std::erase(recent_, plan->fingerprint);
  recent_.push_front(plan->fingerprint);
  constexpr size_t kMostPlans = 256;
  if (recent_.size() > kMostPlans) {
    plans_.erase(recent_.back());
    recent_.pop_back();
  }
  ++counts_.plans;
  core_.measure_again();
  return true;
}

void Daemon::forget() {
  Lock lock(core_.mutex());
  plans_.clear();
  recent_.clear();
  successors_.clear();
  runs_.clear();
  current_.reset();
  offset_ = {};
}

bool Daemon::has_plan(uint64_t fingerprint) {
  Lock lock(core_.mutex());
  return plans_.count(fingerprint) != 0;
}

std::shared_ptr<const Plan> Daemon::plan_with_prefix(uint32_t index, uint64_t prefix) const {
  for (uint64_t fingerprint : recent_) {
    const auto& plan = plans_.at(fingerprint);
    if (index < plan->trace->prefixes.size() && plan->trace->prefixes[index] == prefix) return plan;
  }
  return nullptr;
}

// ---- following the sequence -----------------------------------------------------------------------------------------

void Daemon::follow(std::shared_ptr<const Plan> plan, uint32_t begun, bool expected) {
  current_ = std::make_shared<Run>();
  Run& run = *current_;
  run.begun = begun;
  run.expected = expected;
  run.bindings.resize(plan->trace->variables.size());
  run.plan = std::move(plan);
  if (begun > 0) {  // joined in the middle: what should have moved before is left to demand
    const auto late = [&](MoveKind kind, const Move& move) {
      return kind == kIn ? move.before_function < begun : move.after_function + 2 < static_cast<int32_t>(begun);
    };
    for (const MoveKind kind : {kOut, kIn, kWriteBack, kDown, kUp})
      while (run.next_move(kind) != nullptr && late(kind, *run.next_move(kind))) ++run.next[kind];
    run.outs_done = run.next[kOut];
  }
  runs_.push_back(current_);
}

void Daemon::depart() {
  std::erase(runs_, current_);
  current_.reset();
  offset_ = {};
}

// A tail has one iteration to end in. One that cannot (the plan may be wrong) must not block those after it.
void Daemon::drop_old_tails() {
  if (std::erase_if(runs_, [](const auto& run) { return run->ended; }) > 0) offset_ = {};
}

void Daemon::function_started(uint32_t index, uint64_t prefix) {
  if (index == 0) {
    for (const auto& run : runs_)
      if (run->ended) run->successor_began = true;
    if (!runs_.empty()) changed_.notify_all();
  }
  if (current_) {
    const auto& prefixes = current_->plan->trace->prefixes;
    if (index < prefixes.size() && prefixes[index] == prefix) {
      current_->begun = index + 1;
      if (current_->plan->wakes[index]) changed_.notify_all();
      return;
    }
    const bool expected = current_->expected;
    followed_from_start_ = index == 0;
    depart();
    if (auto other = plan_with_prefix(index, prefix)) {
      ++counts_.switches;
      follow(std::move(other), index + 1, false);
    } else if (expected && index > 0) {
      // What follows a loop differs at its first function, or never ends an iteration, where departures are counted.
      departed_ = true;
    }
    changed_.notify_all();
    return;
  }
  if (index != 0) return;
  if (auto plan = plan_with_prefix(0, prefix)) {
    follow(std::move(plan), 1, false);
    followed_from_start_ = true;
    changed_.notify_all();
  }
}

bool Daemon::iteration_ended(const std::shared_ptr<Trace>& ended) {
  bool complete = false;
  drop_old_tails();
  if (departed_) ++counts_.divergences;
  departed_ = false;
  if (current_) {
    const Plan& plan = *current_->plan;
    complete = plan.fingerprint == ended->fingerprint;
    if (complete) {
      Run& run = *current_;
      run.ended = true;
      for (size_t v = 0; v < run.bindings.size() && v < ended->variables.size(); ++v)
        run.bindings[v] = ended->variables[v].handle;
      std::erase(recent_, plan.fingerprint);
      recent_.push_front(plan.fingerprint);
    } else {
      if (current_->expected && current_->begun < plan.trace->functions()) ++counts_.divergences;
      depart();
    }
  }
  const std::shared_ptr<Run> finished = complete ? current_ : nullptr;
  const bool from_start = followed_from_start_;
  current_.reset();
  followed_from_start_ = false;
  if (last_fingerprint_ != 0) successors_[last_fingerprint_] = ended->fingerprint;
  last_fingerprint_ = ended->fingerprint;
  const auto successor = successors_.find(ended->fingerprint);
  if (successor != successors_.end()) {
    const auto plan = plans_.find(successor->second);
    if (plan != plans_.end()) {
      follow(plan->second, 0, true);
      followed_from_start_ = true;
      if (successor->second == ended->fingerprint)  // entry variables are what the last iteration left
        for (size_t v = 0; v < current_->bindings.size(); ++v) {
          const int32_t previous = plan->second->trace->variables[v].previous;
          if (previous >= 0 && static_cast<size_t>(previous) < ended->variables.size())
            current_->bindings[v] = ended->variables[static_cast<size_t>(previous)].handle;
        }
    }
  }
  changed_.notify_all();
  return complete && from_start;
}

Region* Daemon::bound(const Run& run, uint32_t variable) const {
  if (&run == current_.get()) {
    const auto& seen = recorder_.current().variables;
    if (variable < seen.size()) return seen[variable].handle.get();
  }
  return run.bindings[variable].get();
}

bool Daemon::copies_outlast(const Region* region) const {
  if (!current_ || region->variable < 0) return true;
  const Plan& plan = *current_->plan;
  const auto variable = static_cast<size_t>(region->variable);
  const bool seen = recorder_.seen(region);
  if (variable >= plan.turns.size() || (!seen && region->iteration + 1 != recorder_.iteration())) return true;
  for (const auto& run : runs_)  // those before still have to take something of it
    for (size_t i = run->next[kOut]; run != current_ && i < run->plan->moves[kOut].size(); ++i)
      if (bound(*run, run->plan->moves[kOut][i].variable) == region) return true;
  if (seen)
    for (const Plan::Turn& turn : plan.turns[variable]) {
      const bool written = turn.out == Plan::Turn::kWritten;
      if (written ? turn.function >= current_->begun : turn.out >= current_->next[kOut]) return !written;
    }
  const int32_t id = plan.next_id[variable];
  const auto* next = id < 0 ? nullptr : &plan.turns[static_cast<size_t>(id)];
  return next != nullptr && !next->empty() && next->front().out != Plan::Turn::kWritten;
}

uint64_t Daemon::next_use(const Region* region) const {
  if (!current_ || region->variable < 0) return kUnknown;
  const Plan& plan = *current_->plan;
  const uint64_t functions = plan.trace->functions();
  auto variable = static_cast<size_t>(region->variable);
  if (recorder_.seen(region)) {
    if (variable >= plan.uses.size()) return kUnknown;
    const auto next = plan.first_use(variable, current_->begun);
    if (next != plan.uses[variable].end()) return next->function;
    const int32_t id = plan.next_id[variable];
    if (id < 0 || plan.uses[static_cast<size_t>(id)].empty()) return kNever;
    return functions + plan.uses[static_cast<size_t>(id)].front().function;
  }
  if (region->iteration + 1 != recorder_.iteration() || variable >= plan.next_id.size()) return kNever;  // dormant
  const int32_t id = plan.next_id[variable];  // not used yet in this iteration
  if (id < 0 || plan.uses[static_cast<size_t>(id)].empty()) return kNever;
  return plan.uses[static_cast<size_t>(id)].front().function;
}

}  // namespace ooc
