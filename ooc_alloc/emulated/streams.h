// Streams and events of the emulated device.
//
// A stream is a queue and a thread that works it off in order; the thread starts with the first work and is joined when
// the stream is destroyed. An event stands for the last of its records; a record is done when the stream has come to it.
//
// The default stream (handles 0 and 1) is a stream like others, with the barriers of CUDA's legacy default stream: its work
// begins when what was enqueued before on every stream that was not created CU_STREAM_NON_BLOCKING is done, and what those
// streams get afterwards begins when its work is done. Handle 2 is the calling thread's own default stream, one of those.
// As with the driver, the handle of a destroyed stream is the next new one's. To use it before is undefined behaviour
// there; here it ends the process, so that a test finds it. A thread that waits sleeps.
//
// Each stream has a clock, which says when its work ended on the emulated device (see link.h); events take their times from it.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cuda_abi.h"
#include "link.h"

namespace ooc::emulated {

// One point in the work of a stream, marked by cuEventRecord.
struct EventRecord {
  bool is_done = false;
  TimePoint time{};
};

struct Stream;

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
  std::vector<unsigned char> staged{};  // what `source` points to, where the host may write its own memory at once
  std::vector<std::pair<std::shared_ptr<Stream>, uint64_t>> barrier{};  // how far other streams have to be before
};

class Streams {
 public:
  CUresult create_stream(unsigned flags, CUstream& stream);
  CUresult destroy_stream(CUstream stream);  // waits for its work
  CUresult synchronize_stream(CUstream stream);
  CUresult query_stream(CUstream stream);  // CUDA_SUCCESS or CUDA_ERROR_NOT_READY
  CUresult stream_id(CUstream stream, unsigned long long& id);

  CUresult create_event(unsigned flags, CUevent& event);
  CUresult destroy_event(CUevent event);
  CUresult record(CUevent event, CUstream stream);
  CUresult wait(CUstream stream, CUevent event);
  CUresult synchronize_event(CUevent event);
  CUresult query_event(CUevent event);
  CUresult elapsed(CUevent start, CUevent end, float& milliseconds);

  // A copy, fill or host function. If `wait`, it is done when this returns.
  CUresult enqueue(CUstream stream, Command command, bool wait = false);
  void synchronize_all();

  // True inside a host function, where driver calls are forbidden.
  static bool in_host_function();

  std::mutex mutex;  // public for the fork handlers; guards everything below

 private:
  struct Event;
  using Lock = std::unique_lock<std::mutex>;

  std::shared_ptr<Stream> find(CUstream stream);
  Event* find(CUevent event) const;
  template <class Over>
  void await(Lock& lock, Over over);
  void push(const std::shared_ptr<Stream>& stream, Command command);
  // The work that `stream` may not overtake, beside its own.
  std::vector<std::pair<std::shared_ptr<Stream>, uint64_t>> barrier(const Stream& stream) const;
  void finish(Lock& lock, const std::shared_ptr<Stream>& stream);
  void work(Stream& stream);
  static bool delay(Stream& stream, Lock& lock, double seconds);
  static TimePoint execute(const Command& command, TimePoint start);

  std::shared_ptr<Stream> default_;  // created when it is first used
  std::unordered_map<CUstream, std::shared_ptr<Stream>> streams_;
  uintptr_t last_handle_ = 1 << 16;
  std::vector<CUstream> destroyed_;  // handles that are no stream's now
  unsigned long long last_id_ = 0;
  std::unordered_map<CUevent, std::shared_ptr<Event>> events_;
  std::condition_variable progress_;  // a record is done, or a stream has got further
  int waiting_ = 0;                   // threads that wait for progress_
};

}  // namespace ooc::emulated
