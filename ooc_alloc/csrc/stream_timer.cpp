#include "stream_timer.h"

#include <algorithm>

namespace ooc {

StreamTimer::~StreamTimer() {
  drop_iteration();
  for (const Span& span : spans_) {
    give_back(span.start);
    give_back(span.stop);
  }
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

void StreamTimer::stop(CUstream stream, Start start, double* sum) {
  const CUevent stop = start != nullptr ? record(stream) : nullptr;
  if (stop == nullptr) {
    give_back(start);
    return;
  }
  spans_.push_back({start, stop, sum});
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
    if (state == CUDA_SUCCESS && elapsed(span.start, span.stop, seconds)) *span.sum += seconds;
    give_back(span.start);
    give_back(span.stop);
  }
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
  if (end != nullptr && driver().counted(Counted::kEventSynchronize, driver().cuEventSynchronize(end)) == CUDA_SUCCESS) {
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
