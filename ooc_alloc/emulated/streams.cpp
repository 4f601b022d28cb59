#include "streams.h"

#include <pthread.h>
#include <sys/prctl.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <thread>
#include <vector>

#include "block_signals.h"
#include "faults.h"

namespace ooc::emulated {
namespace {

thread_local bool inside_host_function = false;

constexpr uintptr_t kLegacy = 1, kOfThread = 2;  // reserved handles of default streams; 0 is the legacy one too

}  // namespace

struct Stream {
  bool is_blocking = true;  // with respect to the default stream
  bool is_stopping = false;
  unsigned long long id = 0;
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

std::shared_ptr<Stream> Streams::find(CUstream stream) {
  const auto handle = reinterpret_cast<uintptr_t>(stream);
  if (handle <= kLegacy) {
    if (default_ == nullptr) (default_ = std::make_shared<Stream>())->is_blocking = false;
    return default_;
  }
  if (handle == kOfThread) {
    thread_local std::shared_ptr<Stream> own;
    if (own == nullptr) streams_.emplace(reinterpret_cast<CUstream>(last_handle_ += 16), own = std::make_shared<Stream>());
    return own;
  }
  const auto found = streams_.find(stream);
  if (found != streams_.end()) return found->second;
  if (std::find(destroyed_.begin(), destroyed_.end(), stream) != destroyed_.end()) {
    std::fprintf(stderr, "emulated driver: a stream was used after it was destroyed, which is undefined behaviour\n");
    std::abort();
  }
  return nullptr;
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
  const Lock lock(mutex);
  created->id = ++last_id_;
  if (destroyed_.empty()) {
    stream = reinterpret_cast<CUstream>(last_handle_ += 16);
  } else {
    stream = destroyed_.back();
    destroyed_.pop_back();
  }
  streams_.emplace(stream, std::move(created));
  return CUDA_SUCCESS;
}

CUresult Streams::destroy_stream(CUstream handle) {
  Lock lock(mutex);
  const std::shared_ptr<Stream> stream = find(handle);
  if (streams_.erase(handle) == 0) return CUDA_ERROR_INVALID_HANDLE;
  destroyed_.push_back(handle);
  stream->is_stopping = true;
  stream->wake.notify_all();
  lock.unlock();
  if (stream->thread.joinable()) stream->thread.join();
  return CUDA_SUCCESS;
}

std::vector<std::pair<std::shared_ptr<Stream>, uint64_t>> Streams::barrier(const Stream& stream) const {
  std::vector<std::pair<std::shared_ptr<Stream>, uint64_t>> before;
  const auto add = [&](const std::shared_ptr<Stream>& other) {
    if (other != nullptr && other->completed < other->enqueued) before.emplace_back(other, other->enqueued);
  };
  if (stream.is_blocking) add(default_);
  if (&stream != default_.get()) return before;
  for (const auto& entry : streams_)
    if (entry.second->is_blocking) add(entry.second);
  return before;
}

void Streams::push(const std::shared_ptr<Stream>& stream, Command command) {
  if (!stream->thread.joinable()) {
    const BlockSignals block;
    stream->thread = std::thread([this, stream] { work(*stream); });
  }
  command.ready = std::chrono::steady_clock::now();
  command.delay_seconds = Faults::take_delay();
  command.barrier = barrier(*stream);
  stream->queue.push_back(std::move(command));
  stream->enqueued += 1;
  stream->wake.notify_one();
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
    for (const auto& [other, count] : command.barrier) {
      await(lock, [&] { return other->completed >= count; });
      stream.clock = std::max(stream.clock, other->clock);
    }
    if (!delay(stream, lock, command.delay_seconds)) {
      stream.completed = stream.enqueued;  // nobody waits for it any more
      progress_.notify_all();
      return;
    }
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
  const void* source = command.staged.empty() ? command.source : command.staged.data();
  switch (command.kind) {
    case Command::Kind::kCopy:
      if (command.link != nullptr) return command.link->copy(command.target, source, command.bytes, start);
      std::memmove(command.target, source, command.bytes);
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

CUresult Streams::enqueue(CUstream handle, Command command, bool wait) {
  Lock lock(mutex);
  const std::shared_ptr<Stream> stream = find(handle);
  if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  push(stream, std::move(command));
  if (wait) finish(lock, stream);
  return CUDA_SUCCESS;
}

// Waits for the work that the stream has now, and for what its next work would wait for.
void Streams::finish(Lock& lock, const std::shared_ptr<Stream>& stream) {
  const uint64_t target = stream->enqueued;
  const auto others = barrier(*stream);
  await(lock, [&] { return stream->completed >= target; });
  for (const auto& [other, count] : others) await(lock, [&] { return other->completed >= count; });
}

CUresult Streams::synchronize_stream(CUstream handle) {
  Lock lock(mutex);
  const std::shared_ptr<Stream> stream = find(handle);
  if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  finish(lock, stream);
  return CUDA_SUCCESS;
}

void Streams::synchronize_all() {
  Lock lock(mutex);
  std::vector<std::shared_ptr<Stream>> all{find(nullptr)};
  for (const auto& entry : streams_) all.push_back(entry.second);
  for (const auto& stream : all) finish(lock, stream);
}

CUresult Streams::query_stream(CUstream handle) {
  const Lock lock(mutex);
  const std::shared_ptr<Stream> stream = find(handle);
  if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  return stream->completed == stream->enqueued && barrier(*stream).empty() ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult Streams::stream_id(CUstream handle, unsigned long long& id) {
  const Lock lock(mutex);
  const std::shared_ptr<Stream> stream = find(handle);
  if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  id = stream->id;
  return CUDA_SUCCESS;
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
  const Lock lock(mutex);
  Event* marked = find(event);
  const std::shared_ptr<Stream> stream = find(handle);
  if (marked == nullptr || stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  auto record = std::make_shared<EventRecord>();
  marked->last = record;
  push(stream, {.kind = Command::Kind::kRecord, .record = std::move(record)});
  return CUDA_SUCCESS;
}

CUresult Streams::wait(CUstream handle, CUevent event) {
  const Lock lock(mutex);
  const Event* awaited = find(event);
  const std::shared_ptr<Stream> stream = find(handle);
  if (awaited == nullptr || stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  // The wait is enqueued even if the record is done, as it carries the record's time into the stream's clock.
  if (awaited->last != nullptr) push(stream, {.kind = Command::Kind::kWait, .record = awaited->last});
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
