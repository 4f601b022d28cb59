// Times on the device's clock: how long functions ran, copies took, and streams waited. Events are recorded where
// something begins and ends, and read when they are over; the host waits for none of them but at the end of an iteration
// that is measured whole.
//
// Guarded by the core's lock. A refused event costs its measurement, nothing else.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "device.h"
#include "timeline.h"

namespace ooc {

class StreamTimer {
 public:
  // Spans that the timeline has an event for are put into it when they are over.
  StreamTimer(Device& device, Timeline& timeline) : device_(device), timeline_(timeline) {}
  ~StreamTimer();
  StreamTimer(const StreamTimer&) = delete;
  StreamTimer& operator=(const StreamTimer&) = delete;

  // The time between two calls on one stream is added to `*sum` when it is known. `sum` outlives the timer.
  using Start = CUevent;
  Start start(CUstream stream) { return record(stream); }
  void stop(CUstream stream, Start start, double* sum, uint64_t event = Timeline::kNoEvent);

  // Ties the device's clock to the host's: waits for the stream. What is timed later is told in the host's time.
  void anchor(CUstream stream, double now);
  // Ties it anew without waiting, by the device's own clock: a difference of times is exact only while it is small.
  void move_anchor(CUstream stream);

  // Functions of an iteration that is measured: `before` is recorded before the function's waits, `started` after them
  // (the same call where there are none). A function lasts until the next one's `before`.
  void function_started(CUstream stream, bool waited, Start before);
  // Ends the iteration on the stream of its last function, waits for it, and gives one time for each function that was
  // started; empty if an event was refused.
  std::vector<double> finish_iteration(CUstream stream);
  void drop_iteration();

  // Adds up what is over by now.
  void collect();

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
  };

  CUevent record(CUstream stream);
  void give_back(CUevent event) {
    if (event != nullptr) events_.push_back(event);
  }
  bool elapsed(CUevent start, CUevent stop, double& seconds) const;
  const Driver& driver() const { return device_.driver(); }

  void tell(const Span& span, double seconds);

  Device& device_;
  Timeline& timeline_;
  Anchor anchor_;
  CUevent next_anchor_ = nullptr;  // not over yet
  std::vector<CUevent> events_;
  std::deque<Span> spans_;
  std::vector<Function> functions_;
  bool complete_ = true;  // no event of the iteration was refused
};

}  // namespace ooc
