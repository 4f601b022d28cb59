#include "iterations.h"

#include "audit_check.h"
#include "clock.h"

namespace ooc {

Iterations::Iterations() : began_(now_seconds()) {}

void Iterations::stalled(double seconds, WaitsFor what, const ThreadState* thread) {
  stall_ += seconds;
  (what == WaitsFor::kVariable ? stall_swap_in_ : stall_room_) += seconds;
  if (records(thread)) recorder_.stalled(seconds);
}

// The host's times say when functions were enqueued; the device's, how long they ran.
void Iterations::take_times(Trace& trace, StreamTimer& timer) {
  timer.collect();
  if (left_to_measure_ == 0) return;
  --left_to_measure_;
  const std::vector<double> seconds = timer.finish_iteration(thread_ != nullptr ? thread_->stream_handle : nullptr);
  if (seconds.size() != trace.seconds.size() || trace.overflow) return;
  trace.seconds = seconds;
  double start = 0;
  for (size_t i = 0; i < seconds.size(); ++i) {
    trace.starts[i] = start;
    start += seconds[i];
  }
}

std::shared_ptr<Trace> Iterations::end(double now, const ThreadState* thread, uint64_t moved_bytes, StreamTimer* timer,
                                       ooc_iteration* ended) {
  std::shared_ptr<Trace> trace = recorder_.finish(now);
  if (timer != nullptr) take_times(*trace, *timer);
  thread_ = thread;
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

void Iterations::keep(const std::shared_ptr<Trace>& trace) {
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

std::shared_ptr<Trace> Iterations::trace(uint64_t fingerprint) const {
  const auto kept = traces_.find(fingerprint);
  return kept != traces_.end() ? kept->second : nullptr;
}

void Iterations::fill(ooc_stats& stats) const {
  stats.functions = functions_;
  stats.host_backed_function_count = host_functions_;
  stats.iterations = iterations_;
  stats.planned_iteration_count = planned_;
  stats.stall_seconds = stall_ + device_stall_;
  stats.stall_swap_in_seconds = stall_swap_in_ + device_stall_;
  stats.stall_room_seconds = stall_room_;
}

std::string Iterations::audit() const {
  AuditCheck check;
  check.equal("traces", traces_.size(), kept_.size());
  return check.text();
}

}  // namespace ooc
