#include "streams.h"

#include <pthread.h>
#include <sys/prctl.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <thread>
#include <vector>

#include "block_signals.h"
#include "faults.h"

namespace ooc::emulated {
namespace {

thread_local bool inside_host_function = false;

// The legacy and the per-thread default stream have reserved handles; all are the null stream here.
bool is_null_stream(CUstream stream) { return reinterpret_cast<uintptr_t>(stream) <= 2; }

}  // namespace

struct Streams::Stream {
  bool is_blocking = true;  // with respect to the null stream
  bool is_stopping = false;
  std::deque<Command> queue;
  uint64_t enqueued = 0;
  uint64_t completed = 0;
  TimePoint clock{};  // end of the last command
  std::condition_variable wake;
  std::thread thread;
};

struct Streams::Event {
  bool has_time = true;
  std::shared_ptr<EventRecord> last;  // null: never recorded
};

bool Streams::in_host_function() { return inside_host_function; }

std::shared_ptr<Streams::Stream> Streams::find(CUstream stream) const {
  const auto found = streams_.find(stream);
  return found == streams_.end() ? nullptr : found->second;
}

Streams::Event* Streams::find(CUevent event) const {
  const auto found = events_.find(event);
  return found == events_.end() ? nullptr : found->second.get();
}

template <class Over>
void Streams::await(Lock& lock, Over over) {
  ++waiting_;
  progress_.wait(lock, over);
  --waiting_;
}

CUresult Streams::create_stream(unsigned flags, CUstream& stream) {
  if (flags > CU_STREAM_NON_BLOCKING) return CUDA_ERROR_INVALID_VALUE;
  auto created = std::make_shared<Stream>();
  created->is_blocking = flags == CU_STREAM_DEFAULT;
  stream = reinterpret_cast<CUstream>(created.get());
  const Lock lock(mutex);
  streams_.emplace(stream, std::move(created));
  return CUDA_SUCCESS;
}

CUresult Streams::destroy_stream(CUstream handle) {
  Lock lock(mutex);
  const std::shared_ptr<Stream> stream = find(handle);
  if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  streams_.erase(handle);
  stream->is_stopping = true;
  stream->wake.notify_all();
  lock.unlock();
  if (stream->thread.joinable()) stream->thread.join();
  return CUDA_SUCCESS;
}

CUresult Streams::push(const std::shared_ptr<Stream>& stream, Command command) {
  if (!stream->thread.joinable()) {
    const BlockSignals block;
    stream->thread = std::thread([this, stream] { work(*stream); });
  }
  command.ready = std::chrono::steady_clock::now();
  command.delay_seconds = Faults::take_delay();
  stream->queue.push_back(std::move(command));
  stream->enqueued += 1;
  stream->wake.notify_one();
  return CUDA_SUCCESS;
}

void Streams::work(Stream& stream) {
  pthread_setname_np(pthread_self(), "ooc-emulated");
  prctl(PR_SET_TIMERSLACK, 1ul, 0ul, 0ul, 0ul);  // nanoseconds: sleeps end when the link's time is over
  Lock lock(mutex);
  for (;;) {
    stream.wake.wait(lock, [&] { return stream.is_stopping || !stream.queue.empty(); });
    if (stream.queue.empty()) return;
    const Command command = std::move(stream.queue.front());
    stream.queue.pop_front();
    if (!delay(stream, lock, command.delay_seconds)) return;
    const TimePoint late = command.delay_seconds > 0 ? std::chrono::steady_clock::now() : command.ready;
    const TimePoint start = std::max(late, stream.clock);
    if (command.kind == Command::Kind::kRecord) {
      stream.clock = command.record->time = start;
      command.record->is_done = true;
    } else if (command.kind == Command::Kind::kWait) {
      await(lock, [&] { return command.record->is_done; });
      stream.clock = std::max(start, command.record->time);
    } else {
      lock.unlock();
      const TimePoint end = execute(command, start);
      lock.lock();
      stream.clock = end;
    }
    stream.completed += 1;
    if (waiting_ > 0) progress_.notify_all();
  }
}

// Returns false, when the stream is destroyed, if the work is never to be done.
bool Streams::delay(Stream& stream, Lock& lock, double seconds) {
  if (seconds == 0) return true;
  if (seconds == kNever) {
    stream.wake.wait(lock, [&] { return stream.is_stopping; });
    return false;
  }
  lock.unlock();
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
  lock.lock();
  return true;
}

TimePoint Streams::execute(const Command& command, TimePoint start) {
  switch (command.kind) {
    case Command::Kind::kCopy:
      if (command.link != nullptr) return command.link->copy(command.target, command.source, command.bytes, start);
      std::memmove(command.target, command.source, command.bytes);
      break;
    case Command::Kind::kFill:
      std::memset(command.target, command.value, command.bytes);
      break;
    case Command::Kind::kHostFunction:
      inside_host_function = true;
      command.function(command.user_data);
      inside_host_function = false;
      break;
    case Command::Kind::kRecord:
    case Command::Kind::kWait:
      break;
  }
  return std::chrono::steady_clock::now();
}

CUresult Streams::enqueue(CUstream handle, Command command) {
  Lock lock(mutex);
  if (!is_null_stream(handle)) {
    const std::shared_ptr<Stream> stream = find(handle);
    return stream == nullptr ? CUDA_ERROR_INVALID_HANDLE : push(stream, std::move(command));
  }
  finish_blocking_streams(lock);
  lock.unlock();
  if (const double seconds = Faults::take_delay(); seconds > 0)
    std::this_thread::sleep_for(std::chrono::duration<double>(std::min(seconds, 60.0)));
  execute(command, std::chrono::steady_clock::now());
  return CUDA_SUCCESS;
}

bool Streams::blocking_streams_are_idle() const {
  return std::all_of(streams_.begin(), streams_.end(), [](const auto& entry) {
    return !entry.second->is_blocking || entry.second->completed == entry.second->enqueued;
  });
}

// Waits for the work that is in the queues of blocking streams now.
void Streams::finish_blocking_streams(Lock& lock) {
  if (blocking_streams_are_idle()) return;
  std::vector<std::pair<std::shared_ptr<Stream>, uint64_t>> targets;
  for (const auto& entry : streams_) {
    if (entry.second->is_blocking) targets.emplace_back(entry.second, entry.second->enqueued);
  }
  for (const auto& entry : targets) await(lock, [&] { return entry.first->completed >= entry.second; });
}

CUresult Streams::synchronize_stream(CUstream handle) {
  Lock lock(mutex);
  if (is_null_stream(handle)) {
    finish_blocking_streams(lock);
    return CUDA_SUCCESS;
  }
  const std::shared_ptr<Stream> stream = find(handle);
  if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  const uint64_t target = stream->enqueued;
  await(lock, [&] { return stream->completed >= target; });
  return CUDA_SUCCESS;
}

CUresult Streams::query_stream(CUstream handle) {
  const Lock lock(mutex);
  if (is_null_stream(handle)) return blocking_streams_are_idle() ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
  const std::shared_ptr<Stream> stream = find(handle);
  if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  return stream->completed == stream->enqueued ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult Streams::create_event(unsigned flags, CUevent& event) {
  if (flags > (CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING)) return CUDA_ERROR_INVALID_VALUE;
  auto created = std::make_shared<Event>();
  created->has_time = (flags & CU_EVENT_DISABLE_TIMING) == 0;
  event = reinterpret_cast<CUevent>(created.get());
  const Lock lock(mutex);
  events_.emplace(event, std::move(created));
  return CUDA_SUCCESS;
}

CUresult Streams::destroy_event(CUevent event) {
  const Lock lock(mutex);
  return events_.erase(event) == 1 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUresult Streams::record(CUevent event, CUstream handle) {
  Lock lock(mutex);
  Event* marked = find(event);
  const bool is_null = is_null_stream(handle);
  const std::shared_ptr<Stream> stream = is_null ? nullptr : find(handle);
  if (marked == nullptr || (!is_null && stream == nullptr)) return CUDA_ERROR_INVALID_HANDLE;
  auto record = std::make_shared<EventRecord>();
  marked->last = record;
  if (!is_null) {
    return push(stream, {.kind = Command::Kind::kRecord, .record = std::move(record)});
  }
  finish_blocking_streams(lock);
  record->is_done = true;
  record->time = std::chrono::steady_clock::now();
  progress_.notify_all();
  return CUDA_SUCCESS;
}

CUresult Streams::wait(CUstream handle, CUevent event) {
  Lock lock(mutex);
  const Event* awaited = find(event);
  const bool is_null = is_null_stream(handle);
  const std::shared_ptr<Stream> stream = is_null ? nullptr : find(handle);
  if (awaited == nullptr || (!is_null && stream == nullptr)) return CUDA_ERROR_INVALID_HANDLE;
  const std::shared_ptr<EventRecord> record = awaited->last;
  if (record == nullptr) return CUDA_SUCCESS;
  if (!is_null) {
    // The wait is enqueued even if the record is done, as it carries the record's time into the stream's clock.
    return push(stream, {.kind = Command::Kind::kWait, .record = record});
  }
  await(lock, [&] { return record->is_done; });
  return CUDA_SUCCESS;
}

CUresult Streams::synchronize_event(CUevent event) {
  Lock lock(mutex);
  const Event* awaited = find(event);
  if (awaited == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  const std::shared_ptr<EventRecord> record = awaited->last;
  if (record == nullptr) return CUDA_SUCCESS;
  await(lock, [&] { return record->is_done; });
  return CUDA_SUCCESS;
}

CUresult Streams::query_event(CUevent event) {
  const Lock lock(mutex);
  const Event* asked = find(event);
  if (asked == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  return asked->last == nullptr || asked->last->is_done ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult Streams::elapsed(CUevent start, CUevent end, float& milliseconds) {
  const Lock lock(mutex);
  const Event* first = find(start);
  const Event* second = find(end);
  for (const Event* event : {first, second}) {
    if (event == nullptr || !event->has_time || event->last == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  }
  const EventRecord& from = *first->last;
  const EventRecord& to = *second->last;
  if (!from.is_done || !to.is_done) return CUDA_ERROR_NOT_READY;
  milliseconds = std::chrono::duration<float, std::milli>(to.time - from.time).count();
  return CUDA_SUCCESS;
}

}  // namespace ooc::emulated
