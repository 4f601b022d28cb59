#include "stream_timer.h"

#include <algorithm>

#include "clock.h"

namespace ooc {

StreamTimer::~StreamTimer() {
  drop_iteration();
  for (const Span& span : spans_) {
    give_back(span.start);
    give_back(span.stop);
  }
  give_back(anchor_.event);
  give_back(next_anchor_);
  for (CUevent event : events_) driver().cuEventDestroy(event);
}

CUevent StreamTimer::record(CUstream stream) {
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

bool StreamTimer::elapsed(CUevent start, CUevent stop, double& seconds) const {
  float milliseconds = 0;
  if (driver().cuEventElapsedTime(&milliseconds, start, stop) != CUDA_SUCCESS) return false;
  seconds = std::max(0.0, static_cast<double>(milliseconds) * 1e-3);
  return true;
}

void StreamTimer::anchor(CUstream stream, double now) {
  give_back(next_anchor_);
  next_anchor_ = nullptr;
  give_back(anchor_.event);
  anchor_ = {record(stream), now};
  if (anchor_.event == nullptr) return;
  if (device_.await(anchor_.event) == CUDA_SUCCESS) anchor_.time = now_seconds();
}

void StreamTimer::move_anchor(CUstream stream) {
  if (anchor_.event != nullptr && next_anchor_ == nullptr) next_anchor_ = record(stream);
}

void StreamTimer::tell(const Span& span, double seconds) {
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

void StreamTimer::stop(CUstream stream, Start start, double* sum, uint64_t event) {
  const CUevent stop = start != nullptr ? record(stream) : nullptr;
  if (stop == nullptr) {
    give_back(start);
    return;
  }
  spans_.push_back({start, stop, sum, event});
  constexpr size_t kMostSpans = 256;
  if (spans_.size() > kMostSpans) collect();
}

// Spans of several streams do not end in their order of entry: those that are not over are kept.
void StreamTimer::collect() {
  device_.bind_thread();
  for (size_t left = spans_.size(); left > 0; --left) {
    const Span span = spans_.front();
    spans_.pop_front();
    const CUresult state = driver().cuEventQuery(span.stop);
    double seconds = 0;
    if (state == CUDA_ERROR_NOT_READY) {
      spans_.push_back(span);
      continue;
    }
    if (state == CUDA_SUCCESS && elapsed(span.start, span.stop, seconds)) {
      *span.sum += seconds;
      if (span.event != Timeline::kNoEvent) tell(span, seconds);
    }
    give_back(span.start);
    give_back(span.stop);
  }
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

void StreamTimer::function_started(CUstream stream, bool waited, Start before) {
  const CUevent started = record(stream);
  complete_ = complete_ && started != nullptr && (!waited || before != nullptr);
  functions_.push_back({waited ? before : started, started});
}

void StreamTimer::drop_iteration() {
  for (const Function& function : functions_) {
    give_back(function.started);
    if (function.before != function.started) give_back(function.before);
  }
  functions_.clear();
  complete_ = true;
}

std::vector<double> StreamTimer::finish_iteration(CUstream stream) {
  std::vector<double> seconds;
  const CUevent end = complete_ && !functions_.empty() ? record(stream) : nullptr;
  if (end != nullptr && device_.await(end) == CUDA_SUCCESS) {
    for (size_t i = 0; i < functions_.size(); ++i) {
      const CUevent next = i + 1 < functions_.size() ? functions_[i + 1].before : end;
      double time = 0;
      if (!elapsed(functions_[i].started, next, time)) {
        seconds.clear();
        break;
      }
      seconds.push_back(time);
    }
  }
  give_back(end);
  drop_iteration();
  return seconds;
}

}  // namespace ooc
