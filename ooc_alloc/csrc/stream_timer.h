// Times on the device's clock: how long functions ran, copies took, and streams waited. Events are recorded where
// something begins and ends, and read when they are over; the host waits for none of them but at the end of an iteration
// that is measured whole.
//
// Guarded by the core's lock. A refused event costs its measurement, nothing else.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <unordered_map>
#include <utility>
#include <vector>

#include "clock.h"
#include "device.h"
#include "timeline.h"

namespace ooc {

class StreamTimer {
 public:
  // Spans that the timeline has an event for are put into it when they are over.
  StreamTimer(Device& device, Timeline& timeline) : device_(device), timeline_(timeline) {}
  ~StreamTimer() {
    drop_iteration();
    for (const auto& [stream, spans] : spans_)
      for (const Span& span : spans) {
        give_back(span.start);
        give_back(span.stop);
      }
    give_back(anchor_.event);
    give_back(next_anchor_);
    for (CUevent event : events_) driver().cuEventDestroy(event);
  }
  StreamTimer(const StreamTimer&) = delete;
  StreamTimer& operator=(const StreamTimer&) = delete;

  // The time between two calls on one stream is added to `*sum` when it is known. `sum` outlives the timer.
  using Start = CUevent;
  Start start(CUstream stream) { return record(stream); }
  void stop(CUstream stream, Start start, double* sum, uint64_t event = Timeline::kNoEvent) {
    const CUevent stop = start != nullptr ? record(stream) : nullptr;
    if (stop == nullptr) {
      give_back(start);
      return;
    }
    std::deque<Span>& spans = spans_[stream];
    spans.push_back({start, stop, sum, event});
    constexpr size_t kMostSpans = 256;
    if (spans.size() > kMostSpans) collect(spans);
  }

  // Ties the device's clock to the host's, and waits for the stream to do so. Later times are then given in the host's.
  void anchor(CUstream stream, double now) {
    give_back(next_anchor_);
    next_anchor_ = nullptr;
    give_back(anchor_.event);
    anchor_ = {record(stream), now};
    if (anchor_.event == nullptr) return;
    if (device_.await(anchor_.event) == CUDA_SUCCESS) anchor_.time = now_seconds();
  }
  // Renews the tie without waiting, from the device's own clock: a difference of its times is exact while it is small.
  void move_anchor(CUstream stream) {
    if (anchor_.event != nullptr && next_anchor_ == nullptr) next_anchor_ = record(stream);
  }

  // Functions of an iteration that is measured: `before` is recorded before the function's waits, `started` after them
  // (the same call where there are none). A function lasts until the next one's `before`, but for what its stream idled.
  void function_started(CUstream stream, bool waited, Start before) {
    const CUevent started = record(stream);
    complete_ = complete_ && started != nullptr && (!waited || before != nullptr);
    functions_.push_back({waited ? before : started, started});
  }
  // The stream may be destroyed before the iteration ends.
  void function_ended(CUstream stream) {
    give_back(ended_);
    ended_ = record(stream);
  }
  // From `began` to now the host waited for memory, or mapped it, before it gave the stream more to do.
  void host_was_busy(CUstream stream, Start began) {
    const CUevent done = began != nullptr ? record(stream) : nullptr;
    complete_ = complete_ && done != nullptr;
    if (!functions_.empty() && done != nullptr) {
      functions_.back().idle.emplace_back(began, done);
    } else {
      give_back(began);
      give_back(done);
    }
  }
  // Waits for the iteration's last function, and gives one time for each that was started; empty if an event was refused.
  std::vector<double> finish_iteration() {
    std::vector<double> seconds;
    const CUevent end = complete_ && !functions_.empty() ? ended_ : nullptr;
    if (end != nullptr && device_.await(end) == CUDA_SUCCESS) {
      for (size_t i = 0; i < functions_.size(); ++i) {
        const CUevent next = i + 1 < functions_.size() ? functions_[i + 1].before : end;
        double time = 0, idle = 0;
        if (!elapsed(functions_[i].started, next, time) || !idle_seconds(functions_[i], idle)) {
          seconds.clear();
          break;
        }
        seconds.push_back(std::max(0.0, time - idle));
      }
    }
    drop_iteration();
    return seconds;
  }
  void drop_iteration() {
    for (const Function& function : functions_) {
      give_back(function.started);
      if (function.before != function.started) give_back(function.before);
      for (const auto& [began, done] : function.idle) {
        give_back(began);
        give_back(done);
      }
    }
    functions_.clear();
    give_back(ended_);
    ended_ = nullptr;
    complete_ = true;
  }

  // Adds up what is over by now.
  void collect() {
    device_.bind_thread();
    for (auto& [stream, spans] : spans_) collect(spans);
    if (next_anchor_ == nullptr || driver().cuEventQuery(next_anchor_) == CUDA_ERROR_NOT_READY) return;
    float milliseconds = 0;
    if (driver().cuEventElapsedTime(&milliseconds, anchor_.event, next_anchor_) == CUDA_SUCCESS) {
      give_back(anchor_.event);
      anchor_ = {next_anchor_, anchor_.time + static_cast<double>(milliseconds) * 1e-3};
    } else {
      give_back(next_anchor_);
    }
    next_anchor_ = nullptr;
  }

 private:
  struct Span {
    CUevent start, stop;
    double* sum;
    uint64_t event;
  };
  struct Anchor {
    CUevent event = nullptr;
    double time = 0;
  };
  struct Function {
    CUevent before, started;  // the same if it did not wait
    std::vector<std::pair<CUevent, CUevent>> idle{};
  };

  // A stream that has nothing to do reaches both events of a pair as they are recorded, a busy one together.
  bool idle_seconds(const Function& function, double& seconds) const {
    for (const auto& [began, done] : function.idle) {
      double pair = 0;
      if (!elapsed(began, done, pair)) return false;
      seconds += pair;
    }
    return true;
  }

  // The spans of a stream end in their order, so the first one that is not over is the last one that is asked for.
  void collect(std::deque<Span>& spans) {
    while (!spans.empty()) {
      const Span span = spans.front();
      const CUresult state = driver().cuEventQuery(span.stop);
      if (state == CUDA_ERROR_NOT_READY) return;
      spans.pop_front();
      double seconds = 0;
      if (state == CUDA_SUCCESS && elapsed(span.start, span.stop, seconds)) {
        *span.sum += seconds;
        if (span.event != Timeline::kNoEvent) tell(span, seconds);
      }
      give_back(span.start);
      give_back(span.stop);
    }
  }
  CUevent record(CUstream stream) {
    device_.bind_thread();
    if (device_.captures(stream)) return nullptr;
    CUevent event = nullptr;
    if (!events_.empty()) {
      event = events_.back();
      events_.pop_back();
    } else if (driver().counted(Counted::kEventCreate, driver().cuEventCreate(&event, CU_EVENT_BLOCKING_SYNC)) != CUDA_SUCCESS) {
      return nullptr;
    }
    if (driver().counted(Counted::kEventRecord, driver().cuEventRecord(event, stream)) == CUDA_SUCCESS) return event;
    give_back(event);
    return nullptr;
  }
  void give_back(CUevent event) {
    if (event != nullptr) events_.push_back(event);
  }
  bool elapsed(CUevent start, CUevent stop, double& seconds) const {
    float milliseconds = 0;
    if (driver().cuEventElapsedTime(&milliseconds, start, stop) != CUDA_SUCCESS) return false;
    seconds = std::max(0.0, static_cast<double>(milliseconds) * 1e-3);
    return true;
  }
  const Driver& driver() const { return device_.driver(); }

  void tell(const Span& span, double seconds) {
    ooc_event* event = timeline_.at(span.event);
    if (event == nullptr) return;
    double since = 0;
    float milliseconds = 0;
    if (anchor_.event != nullptr &&
        driver().cuEventElapsedTime(&milliseconds, anchor_.event, span.start) == CUDA_SUCCESS) {
      since = static_cast<double>(milliseconds) * 1e-3;  // negative for what began before
      event->start = anchor_.time + since;
    }
    event->end = event->start + seconds;
  }

  Device& device_;
  Timeline& timeline_;
  Anchor anchor_;
  CUevent next_anchor_ = nullptr;  // not over yet
  std::vector<CUevent> events_;
  std::unordered_map<CUstream, std::deque<Span>> spans_;
  std::vector<Function> functions_;
  CUevent ended_ = nullptr;  // the last of them
  bool complete_ = true;  // no event of the iteration was refused
};

// While one exists, the host waits for memory or maps it, or has the stream wait. `timer` is null where nothing is measured.
class HostBusy {
 public:
  HostBusy(StreamTimer* timer, CUstream stream)
      : timer_(timer), stream_(stream), began_(timer != nullptr ? timer->start(stream) : nullptr) {}
  ~HostBusy() {
    if (timer_ != nullptr) timer_->host_was_busy(stream_, began_);
  }
  HostBusy(const HostBusy&) = delete;
  HostBusy& operator=(const HostBusy&) = delete;

 private:
  StreamTimer* timer_;
  CUstream stream_;
  StreamTimer::Start began_;
};

}  // namespace ooc
