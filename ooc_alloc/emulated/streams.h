// Streams and events of the emulated device.
//
// A stream is a queue and a thread that works it off in order; the thread starts with the first work and is joined when
// the stream is destroyed. An event stands for the last of its records; a record is done when the stream has come to it.
//
// The null stream is synchronous: work on it waits for every stream that was not created CU_STREAM_NON_BLOCKING, and is
// done in the calling thread. A thread that waits sleeps.
//
// Each stream has a clock, which says when its work ended on the emulated device (see link.h); events take their times from it.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "cuda_abi.h"
#include "link.h"

namespace ooc::emulated {

// One point in the work of a stream, marked by cuEventRecord.
struct EventRecord {
  bool is_done = false;
  TimePoint time{};
};

struct Command {
  enum class Kind { kCopy, kFill, kHostFunction, kRecord, kWait };
  Kind kind = Kind::kCopy;
  Link* link = nullptr;  // of a copy between host and device; null: within the device
  void* target = nullptr;
  const void* source = nullptr;
  size_t bytes = 0;
  unsigned char value = 0;
  CUhostFn function = nullptr;
  void* user_data = nullptr;
  std::shared_ptr<EventRecord> record{};
  TimePoint ready{};  // when it was enqueued
  double delay_seconds = 0;  // on request (faults.h)
};

class Streams {
 public:
  CUresult create_stream(unsigned flags, CUstream& stream);
  CUresult destroy_stream(CUstream stream);  // waits for its work
  CUresult synchronize_stream(CUstream stream);
  CUresult query_stream(CUstream stream);  // CUDA_SUCCESS or CUDA_ERROR_NOT_READY

  CUresult create_event(unsigned flags, CUevent& event);
  CUresult destroy_event(CUevent event);
  CUresult record(CUevent event, CUstream stream);
  CUresult wait(CUstream stream, CUevent event);
  CUresult synchronize_event(CUevent event);
  CUresult query_event(CUevent event);
  CUresult elapsed(CUevent start, CUevent end, float& milliseconds);

  // A copy, fill or host function. On the null stream it is done when this returns.
  CUresult enqueue(CUstream stream, Command command);

  // True inside a host function, where driver calls are forbidden.
  static bool in_host_function();

  std::mutex mutex;  // public for the fork handlers; guards everything below

 private:
  struct Stream;
  struct Event;
  using Lock = std::unique_lock<std::mutex>;

  std::shared_ptr<Stream> find(CUstream stream) const;
  Event* find(CUevent event) const;
  template <class Over>
  void await(Lock& lock, Over over);
  CUresult push(const std::shared_ptr<Stream>& stream, Command command);
  bool blocking_streams_are_idle() const;
  void finish_blocking_streams(Lock& lock);
  void work(Stream& stream);
  static bool delay(Stream& stream, Lock& lock, double seconds);
  static TimePoint execute(const Command& command, TimePoint start);

  std::unordered_map<CUstream, std::shared_ptr<Stream>> streams_;
  std::unordered_map<CUevent, std::shared_ptr<Event>> events_;
  std::condition_variable progress_;  // a record is done, or a stream has got further
  int waiting_ = 0;                   // threads that wait for progress_
};

}  // namespace ooc::emulated
