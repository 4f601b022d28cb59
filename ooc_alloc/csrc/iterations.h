// The iterations: the sequence that is recorded of the one under way, the traces of those that ended, and what they
// took. Functions of one thread make the sequence. Guarded by the core's lock.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>

#include "audit_check.h"
#include "clock.h"
#include "ooc_alloc.h"
#include "recorder.h"
#include "repeats.h"
#include "stream_timer.h"
#include "thread_state.h"

namespace ooc {

class Iterations {
 public:
  Iterations() : began_(now_seconds()) {}

  Recorder& recorder() { return recorder_; }
  const Recorder& recorder() const { return recorder_; }

  // ---- the thread whose functions are recorded: the first one, and then the one that ended the last iteration, or took
  // the sequence
  bool records(const ThreadState* thread) const { return thread != nullptr && thread == thread_ && thread->part != Part::kApart; }
  // A function of the thread begins. Returns whether it is recorded.
  bool begin_function(const ThreadState* thread, uint32_t function) {
    if (thread_ == nullptr && !taker_left_ && thread->part != Part::kApart) thread_ = thread;
    if (!records(thread)) return false;
    recorder_.begin_function(function, now_seconds());
    if (__builtin_expect(thread->part == Part::kRemakes, false)) recorder_.remakes();
    if (__builtin_expect(recorder_.current().own_functions() == repeats_.next(), false) && thread == watches_)
      repeats_.look(recorder_.current());
    return true;
  }
  // Where functions of the thread repeat what came before, `found` is called. Null: nobody watches.
  void watch_repeats(const ThreadState* thread, Repeats::Found found, void* first, void* second) {
    watches_ = thread;
    repeats_.watch(found, first, second);
  }
  bool recorded_function_runs() const { return records(thread_) && thread_->in_function; }
  // The thread's functions are recorded from now on, if the recorded one rests: it is gone, it took the sequence itself
  // and whoever asks knows that it is done, or it has begun no function since somebody asked before. Returns whether.
  bool take(const ThreadState* thread) {
    const std::pair<uint64_t, uint32_t> now{recorder_.iteration(), recorder_.current().functions()};
    const bool rests = thread_ == nullptr || thread_ == thread || thread_ == taker_ || now == asked_at_;
    asked_at_ = now;
    if (rests) {
      thread_ = taker_ = thread;
      taker_left_ = false;
    }
    return rests;
  }
  void thread_exits(const ThreadState* thread) {
    if (thread_ == thread) thread_ = nullptr;
    if (watches_ == thread) watches_ = nullptr;
    if (taker_ == thread) {  // others like it are at their work, and take it as they begin the next
      taker_ = nullptr;
      taker_left_ = thread_ == nullptr;
    }
  }
  void count_function(bool on_host) {
    ++functions_;
    if (on_host) ++host_functions_;
  }

  // ---- waiting: it is not the running function's time
  enum class WaitsFor { kVariable, kRoom };
  void stalled(double seconds, WaitsFor what, const ThreadState* thread) {
    stall_ += seconds;
    (what == WaitsFor::kVariable ? stall_swap_in_ : stall_room_) += seconds;
    if (records(thread)) recorder_.stalled(seconds);
  }
  double stall_room_seconds() const { return stall_room_; }
  // Where the timer adds the seconds that streams waited for copies.
  double* device_stall() { return &device_stall_; }

  // ---- the device's clock: functions are timed one by one while plans are made of their times
  bool measures() const { return left_to_measure_ > 0; }
  void measure_again() { left_to_measure_ = kMeasured; }

  // ---- the end of an iteration
  // Closes the sequence, whose next one the thread's functions make, and fills in what it says of the iteration.
  // `moved_bytes` counts from the core's start. `timer` is null where functions run on the host.
  std::shared_ptr<Trace> end(double now, const ThreadState* thread, uint64_t moved_bytes, StreamTimer* timer,
                             ooc_iteration* ended) {
    std::shared_ptr<Trace> trace = recorder_.finish(now);
    ended->timed = timer == nullptr || take_times(*trace, *timer) ? 1 : 0;
    thread_ = thread;
    taker_left_ = false;
    repeats_.ended(trace->own_functions());
    ended->fingerprint = trace->fingerprint;
    ended->functions = trace->functions();
    ended->variables = static_cast<uint32_t>(trace->variables.size());
    ended->uses = static_cast<uint32_t>(trace->uses.size());
    ended->contains_first = iterations_++ == 0 ? 1 : 0;
    ended->seen_count = ++seen_counts_[trace->fingerprint];
    ended->swapped_bytes = moved_bytes - moved_before_;
    ended->seconds = now - began_;
    const double stall = stall_ + device_stall_;
    ended->stall_seconds = stall - stall_before_;
    moved_before_ = moved_bytes;
    stall_before_ = stall;
    began_ = now;
    return trace;
  }
  void followed_plan() { ++planned_; }
  void keep(const std::shared_ptr<Trace>& trace) {
    if (trace->overflow) return;
    if (!traces_.count(trace->fingerprint)) {
      kept_.push_back(trace->fingerprint);
      if (kept_.size() > kMostTraces) {
        traces_.erase(kept_.front());
        kept_.pop_front();
      }
    }
    traces_[trace->fingerprint] = trace;
  }
  // Null: none is kept.
  std::shared_ptr<Trace> trace(uint64_t fingerprint) const {
    const auto kept = traces_.find(fingerprint);
    return kept != traces_.end() ? kept->second : nullptr;
  }

  void fill(ooc_stats& stats) const {
    stats.functions = functions_;
    stats.host_backed_function_count = host_functions_;
    stats.iterations = iterations_;
    stats.planned_iteration_count = planned_;
    stats.stall_seconds = stall_ + device_stall_;
    stats.stall_swap_in_seconds = stall_swap_in_ + device_stall_;
    stats.stall_room_seconds = stall_room_;
  }
  // Whether what is kept belongs together. Empty if it does.
  std::string audit() const {
    AuditCheck check;
    check.equal("traces", traces_.size(), kept_.size());
    return check.text();
  }

 private:
  // The host's times say when functions were enqueued; the device's, how long they ran.
  // Returns whether they are known.
  bool take_times(Trace& trace, StreamTimer& timer) {
    timer.collect();
    if (left_to_measure_ == 0) return false;
    --left_to_measure_;
    const std::vector<double> seconds = timer.finish_iteration();
    if (seconds.size() != trace.seconds.size() || trace.overflow) return false;
    trace.seconds = seconds;
    double start = 0;
    for (size_t i = 0; i < seconds.size(); ++i) {
      trace.starts[i] = start;
      start += seconds[i];
    }
    return true;
  }

  static constexpr int kMeasured = 4;  // until a plan was made, and made again, of times without disturbance
  static constexpr size_t kMostTraces = 64;

  Recorder recorder_;
  Repeats repeats_;
  const ThreadState* thread_ = nullptr;
  const ThreadState* watches_ = nullptr;  // the thread that is told of repeats
  const ThreadState* taker_ = nullptr;  // the last thread that took the sequence
  bool taker_left_ = false;              // and was the recorded one
  std::pair<uint64_t, uint32_t> asked_at_{0, 0};  // where the sequence was when somebody wanted to take it
  int left_to_measure_ = kMeasured;
  uint64_t functions_ = 0, host_functions_ = 0, iterations_ = 0, planned_ = 0;
  double stall_ = 0, stall_swap_in_ = 0, stall_room_ = 0, device_stall_ = 0;
  double began_;
  uint64_t moved_before_ = 0;
  double stall_before_ = 0;
  std::unordered_map<uint64_t, std::shared_ptr<Trace>> traces_;
  std::unordered_map<uint64_t, uint64_t> seen_counts_;
  std::deque<uint64_t> kept_;  // fingerprints of traces_, the oldest first
};

}  // namespace ooc
