#include "daemon.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <cstdio>
#include <exception>

namespace ooc {
namespace {

// A function, and perhaps a part of a variable; the first use that is not before a function.
using Uses = std::vector<Plan::Use>;
Uses::const_iterator first_use(const Uses& uses, uint32_t function) {
  return std::lower_bound(uses.begin(), uses.end(), function,
                          [](const Plan::Use& use, uint32_t value) { return use.function < value; });
}

bool overlap(Trace::Range one, const Move& move) {
  return one.first < move.first + move.count && (move.first < one.first || move.first - one.first < one.count);
}

// Its bytes are not on the device, and may be brought there.
bool may_come(const Slot& slot) { return slot.chunk == kNoChunk && slot.kept == 0; }

class BlockSignals {
 public:
  BlockSignals() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~BlockSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  BlockSignals(const BlockSignals&) = delete;
  BlockSignals& operator=(const BlockSignals&) = delete;

 private:
  sigset_t before_;
};

// The program's signals are for its own threads. Throws if the system has no thread to give.
template <class Body>
std::thread thread_without_signals(const char* name, Body body) {
  const BlockSignals blocked;
  std::thread thread(body);
  pthread_setname_np(thread.native_handle(), name);
  return thread;
}

}  // namespace

Daemon::Daemon(Core& core, bool start_threads) : core_(core) {
  Lock lock(core_.mutex());
  core_.set_scheduler(this);
  if (!start_threads) return;
  try {
    out_thread_ = thread_without_signals("ooc-swap-out", [this] { serve(0, &Daemon::tick_out); });
    in_thread_ = thread_without_signals("ooc-swap-in", [this] { serve(1, &Daemon::tick_in); });
  } catch (const std::exception& error) {  // one direction alone would fill the device, or the host
    std::fprintf(stderr, "ooc_alloc: the system gives no thread for the swap daemon (%s): variables move on demand alone\n",
                 error.what());
    stop_ = true;
    core_.changed().notify_all();
    lock.unlock();
    if (out_thread_.joinable()) out_thread_.join();
    lock.lock();
    stop_ = false;
  }
}

Daemon::~Daemon() { stop(); }

void Daemon::stop() {
  {
    Lock lock(core_.mutex());
    if (core_.forked()) {  // the threads are the parent's
      if (out_thread_.joinable()) out_thread_.detach();
      if (in_thread_.joinable()) in_thread_.detach();
      return;
    }
    core_.set_scheduler(nullptr);
    stop_ = true;
    runs_.clear();
    current_.reset();
    core_.changed().notify_all();
  }
  if (out_thread_.joinable()) out_thread_.join();
  if (in_thread_.joinable()) in_thread_.join();
}

void Daemon::serve(size_t direction, bool (Daemon::*tick)(Lock&)) {
  core_.device().bind_thread();
  core_.device().set_capture_mode(CU_STREAM_CAPTURE_MODE_RELAXED);  // queries of events would end the capture of another thread
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
      core_.changed().notify_all();
    }
    if (rounds_asked_ == round) core_.changed().wait(lock);
  }
}

// Work of one direction can make some for the other: over when a whole round of both did nothing.
void Daemon::settle() {
  Lock lock(core_.mutex());
  // Without threads nothing is under way; those of a forked child are its parent's.
  if (core_.forked() || !out_thread_.joinable() || !in_thread_.joinable()) return;
  uint64_t before = 0;
  do {
    before = work_done_;
    const uint64_t round = ++rounds_asked_;
    core_.changed().notify_all();
    core_.changed().wait(lock, [&] { return stop_ || (rounds_seen_[0] >= round && rounds_seen_[1] >= round); });
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
  auto number = [](int32_t value) { return static_cast<uint32_t>(std::max(value, 0)); };
  for (uint32_t i = 0; i < source.outs; ++i)
    plan->outs.push_back({number(source.out_variable[i]), number(source.out_first_chunk[i]),
                          number(source.out_chunk_count[i]), source.out_after_function[i], 0, 0});
  for (uint32_t i = 0; i < source.ins; ++i)
    plan->ins.push_back({number(source.in_variable[i]), number(source.in_first_chunk[i]),
                         number(source.in_chunk_count[i]), source.in_after_function[i],
                         number(source.in_after_outs[i]), number(source.in_before_function[i])});
  for (uint32_t i = 0; i < source.write_backs; ++i)
    plan->write_backs.push_back({number(source.back_variable[i]), number(source.back_first_chunk[i]),
                                 number(source.back_chunk_count[i]), source.back_after_function[i], 0, 0});
  for (const auto* moves : {&plan->outs, &plan->ins, &plan->write_backs})
    for (const Move& move : *moves)
      if (move.variable >= variables || move.after_function >= static_cast<int32_t>(trace.functions())) return false;
  plan->uses.resize(variables);
  for (const Trace::Use& use : trace.uses) plan->uses[use.variable].push_back({use.function, trace.range(use)});
  plan->next_id.assign(variables, -1);
  for (size_t v = 0; v < variables; ++v) {
    const int32_t previous = trace.variables[v].previous;
    if (previous >= 0 && static_cast<size_t>(previous) < variables) plan->next_id[static_cast<size_t>(previous)] = static_cast<int32_t>(v);
  }
  plan->wakes.assign(trace.functions() + 1, false);
  for (const auto* moves : {&plan->outs, &plan->ins, &plan->write_backs})
    for (const Move& move : *moves)
      if (move.after_function >= -1) plan->wakes[static_cast<size_t>(move.after_function + 1)] = true;
  if (!plan->wakes.empty()) plan->wakes[0] = true;  // the tail of the run before
  plans_[plan->fingerprint] = plan;
  recent_.erase(std::remove(recent_.begin(), recent_.end(), plan->fingerprint), recent_.end());
  recent_.push_front(plan->fingerprint);
  constexpr size_t kMostPlans = 256;
  if (recent_.size() > kMostPlans) {
    plans_.erase(recent_.back());
    recent_.pop_back();
  }
  core_.counters().plan_count = core_.counters().plan_count + 1;
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
  out_offset_ = in_offset_ = write_back_offset_ = 0;
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
  const auto from = static_cast<int32_t>(begun);
  if (begun > 0) {  // joined in the middle: what should have moved before is left to demand
    while (run.next_out < plan->outs.size() && plan->outs[run.next_out].after_function + 2 < from) ++run.next_out;
    while (run.next_in < plan->ins.size() && plan->ins[run.next_in].before_function < begun) ++run.next_in;
    run.outs_done = run.next_out;
    const auto& backs = plan->write_backs;
    while (run.next_write_back < backs.size() && backs[run.next_write_back].after_function + 2 < from) ++run.next_write_back;
  }
  run.plan = std::move(plan);
  runs_.push_back(current_);
}

void Daemon::depart() {
  runs_.erase(std::remove(runs_.begin(), runs_.end(), current_), runs_.end());
  current_.reset();
  out_offset_ = in_offset_ = write_back_offset_ = 0;
}

// A tail has one iteration to end in. One that cannot (the plan may be wrong) must not block those after it.
void Daemon::drop_old_tails() {
  const auto ended = [](const auto& run) { return run->ended; };
  const auto kept = std::remove_if(runs_.begin(), runs_.end(), ended);
  if (kept == runs_.end()) return;
  runs_.erase(kept, runs_.end());
  out_offset_ = in_offset_ = write_back_offset_ = 0;
}

void Daemon::function_started(uint32_t index, uint64_t prefix) {
  if (index == 0) {
    for (const auto& run : runs_)
      if (run->ended) run->successor_began = true;
    if (!runs_.empty()) core_.changed().notify_all();
  }
  if (current_) {
    const auto& prefixes = current_->plan->trace->prefixes;
    if (index < prefixes.size() && prefixes[index] == prefix) {
      current_->begun = index + 1;
      if (current_->plan->wakes[index]) core_.changed().notify_all();
      return;
    }
    const bool expected = current_->expected;
    followed_from_start_ = index == 0;
    depart();
    if (auto other = plan_with_prefix(index, prefix)) {
      ++core_.counters().plan_switch_count;
      follow(std::move(other), index + 1, false);
    } else if (expected && index > 0) {  // at its first function, the loop has ended, the sequence was not departed from
      departed_ = true;                  // nor is it if no other iteration comes after a loop's
    }
    core_.changed().notify_all();
    return;
  }
  if (index != 0) return;
  if (auto plan = plan_with_prefix(0, prefix)) {
    follow(std::move(plan), 1, false);
    followed_from_start_ = true;
    core_.changed().notify_all();
  }
}

bool Daemon::iteration_ended(const std::shared_ptr<Trace>& ended) {
  bool complete = false;
  drop_old_tails();
  if (departed_) ++core_.counters().divergence_count;
  departed_ = false;
  if (current_) {
    const Plan& plan = *current_->plan;
    complete = plan.fingerprint == ended->fingerprint;
    if (complete) {
      Run& run = *current_;
      run.ended = true;
      for (size_t v = 0; v < run.bindings.size() && v < ended->variables.size(); ++v)
        run.bindings[v] = ended->variables[v].handle;
      recent_.erase(std::remove(recent_.begin(), recent_.end(), plan.fingerprint), recent_.end());
      recent_.push_front(plan.fingerprint);
    } else {
      if (current_->expected && current_->begun < plan.trace->functions()) ++core_.counters().divergence_count;
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
  core_.changed().notify_all();
  return complete && from_start;
}

Region* Daemon::bound(const Run& run, uint32_t variable) const {
  if (&run == current_.get()) {
    const auto& seen = core_.recorder().current().variables;
    if (variable < seen.size()) return seen[variable].handle.get();
  }
  return run.bindings[variable].get();
}

uint64_t Daemon::next_use(const Region* region) const {
  if (!current_ || region->variable < 0) return kUnknown;
  const Recorder& recorder = core_.recorder();
  const Plan& plan = *current_->plan;
  const uint64_t functions = plan.trace->functions();
  auto variable = static_cast<size_t>(region->variable);
  if (recorder.seen(region)) {
    if (variable >= plan.uses.size()) return kUnknown;
    const auto& uses = plan.uses[variable];
    const auto next = first_use(uses, current_->begun);
    if (next != uses.end()) return next->function;
    const int32_t id = plan.next_id[variable];
    if (id < 0 || plan.uses[static_cast<size_t>(id)].empty()) return kNever;
    return functions + plan.uses[static_cast<size_t>(id)].front().function;
  }
  if (region->iteration + 1 != recorder.iteration() || variable >= plan.next_id.size()) return kNever;  // dormant
  const int32_t id = plan.next_id[variable];  // not used yet in this iteration
  if (id < 0 || plan.uses[static_cast<size_t>(id)].empty()) return kNever;
  return plan.uses[static_cast<size_t>(id)].front().function;
}

// ---- moving ---------------------------------------------------------------------------------------------------------

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
  if (&run != current_.get()) return core_.recorder().seen(region, move.first, move.count);
  const auto& uses = run.plan->uses[move.variable];
  for (auto use = first_use(uses, static_cast<uint32_t>(move.after_function + 1)); use != uses.end(); ++use) {
    if (use->function >= run.begun) return false;
    if (overlap(use->range, move)) return true;
  }
  return false;
}

// A run before this one is still to move some of these chunks out.
bool Daemon::leaves_before(const Run& run, const Move& move, const Region* region) const {
  for (uint32_t i = move.first; i < std::min(move.first + move.count, region->count); ++i)
    if (region->slots[i].leaving && !region->slots[i].staying) return true;
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
  const auto pieces = static_cast<uint32_t>(core_.piece_chunks());
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
  if (usable) core_.start_out(lock, {region, first, count}, transfers);
  starting_out_ = false;
  for (const Transfer& transfer : transfers) flying_out_.push_back({transfer, keep, false, false});
  if (last) {
    if (flying_out_.empty()) {
      ++keep->outs_done;
      core_.changed().notify_all();
    } else {
      flying_out_.push_back({Transfer{}, keep, true, false});  // settles after all that was started before it
    }
  }
  return true;
}

// A piece of the next write-back, if nothing has used the variable since, nor uses it now. Whatever comes of it, no move
// waits for it.
void Daemon::start_write_back(Lock& lock, Run& run) {
  const Move& move = run.plan->write_backs[run.next_write_back];
  Region* region = bound(run, move.variable);
  const uint32_t first = move.first + write_back_offset_;
  const bool usable = region != nullptr && region->pins == 0 && first < region->count && !used_since(run, move, region);
  const auto pieces = static_cast<uint32_t>(core_.piece_chunks());
  const uint32_t count = usable ? std::min({pieces, move.count - write_back_offset_, region->count - first}) : 0;
  write_back_offset_ += count;
  if (!usable || write_back_offset_ >= move.count) {
    ++run.next_write_back;
    write_back_offset_ = 0;
  }
  std::vector<Transfer> transfers;
  if (usable) core_.start_out(lock, {region, first, count}, transfers, true);
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
  core_.changed().notify_all();
  return true;
}

bool Daemon::start_piece_in(Lock& lock, Run& run) {
  const Move& move = run.plan->ins[run.next_in];
  Region* region = bound(run, move.variable);
  // Used in the next iteration already; or demand has seen to it.
  const bool late = run.ended ? region != nullptr && core_.recorder().seen(region, move.first, move.count)
                              : move.before_function < run.begun;
  const uint32_t end = region == nullptr ? 0 : std::min(move.first + move.count, region->count);
  uint32_t first = move.first + in_offset_;
  while (region != nullptr && first < end && !may_come(region->slots[first])) ++first;
  if (region != nullptr && !late && first >= end && leaves_before(run, move, region)) return false;
  if (region == nullptr || late || first >= end) {
    ++run.next_in;
    in_offset_ = 0;
    drop_finished_runs();
    return true;
  }
  uint32_t last = first;
  while (last < end && last - first < core_.piece_chunks() && may_come(region->slots[last]) &&
         region->slots[last].blank == region->slots[first].blank)
    ++last;
  std::vector<Chunk> chunks(last - first);
  const bool taken = !core_.threads_want_room() && core_.take_idle(last - first, chunks.data());
  core_.want_idle(!taken);
  if (!taken) return false;
  in_offset_ = last - move.first;
  std::vector<Transfer> transfers;
  core_.start_in(lock, {region, first, last - first}, chunks.data(), transfers);
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
