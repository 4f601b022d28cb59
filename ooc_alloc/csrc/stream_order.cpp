#include "stream_order.h"

#include <algorithm>
#include <cstdlib>

#include "audit_check.h"

namespace ooc {
namespace {

#ifdef OOC_EDGES_CAN_BE_OMITTED
bool omitted(Edge edge) {
  static const char* number = std::getenv("OOC_WITHOUT_EDGE");
  return number != nullptr && edge == static_cast<Edge>(std::atoi(number));
}
#else
constexpr bool omitted(Edge) { return false; }
#endif

}  // namespace

StreamOrder::StreamOrder(Device& device, bool safe) : device_(device), safe_(safe), streams_(kFirstCompute) {
  streams_[kOut].handle = device.stream(Direction::kOut);
  streams_[kIn].handle = device.stream(Direction::kIn);
}

StreamOrder::~StreamOrder() {
  for (Stream& stream : streams_)
    for (const Mark& mark : stream.marks) events_.push_back(mark.event);
  for (CUevent event : events_) driver().cuEventDestroy(event);
}

uint32_t StreamOrder::compute_stream(CUstream handle) {
  uint32_t i = kFirstCompute;
  while (i < streams_.size() && streams_[i].handle != handle) ++i;
  if (i < streams_.size() && streams_[i].recorded != Recorded::kAtOnce) return i;
  unsigned long long id = 0;
  if (handle != nullptr && driver().cuStreamGetId != nullptr) {
    device_.bind_thread();
    driver().cuStreamGetId(handle, &id);
  }
  if (i < streams_.size()) {
    if (streams_[i].id != id) {
      // The driver gave the handle of a destroyed stream, whose work may be under way, to a new one, which waited for nobody.
      (void)drain(streams_[i]);  // where the device is lost, whoever waits for its moments is told so
      streams_[i].id = id;
      streams_[i].waits.clear();
    }
    return i;
  }
  streams_.emplace_back();
  streams_.back().handle = handle;
  streams_.back().id = id;
  if (handle != nullptr) streams_.back().recorded = Recorded::kAtOnce;
  return static_cast<uint32_t>(streams_.size() - 1);
}

Moments StreamOrder::now_everywhere() {
  Moments moments;
  for (uint32_t i = kFirstCompute; i < streams_.size(); ++i)
    moments.add(streams_[i].recorded == Recorded::kAtOnce ? Moment{i, streams_[i].issued} : now(i));
  return moments;
}

CUevent StreamOrder::take_event() {
  CUevent event = nullptr;
  if (!events_.empty()) {
    event = events_.back();
    events_.pop_back();
    return event;
  }
  constexpr unsigned kFlags = CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING;
  if (driver().counted(Counted::kEventCreate, driver().cuEventCreate(&event, kFlags)) != CUDA_SUCCESS) return nullptr;
  ++created_;
  return event;
}

// Events whose work is over go back to the pool, the oldest first.
CUresult StreamOrder::collect(Stream& stream) {
  while (!stream.marks.empty()) {
    const CUresult result = driver().cuEventQuery(stream.marks.front().event);
    if (result != CUDA_SUCCESS) return result;
    stream.over = std::max(stream.over, stream.marks.front().number);
    events_.push_back(stream.marks.front().event);
    stream.marks.pop_front();
  }
  return CUDA_SUCCESS;
}

bool StreamOrder::drain(Stream& stream, bool is_there) {
  device_.bind_thread();
  const uint64_t issued = stream.issued;
  if (!is_there && stream.recorded == Recorded::kAtFunctions && device_.captures(stream.handle)) {
    // What is enqueued now does not run, and asking for it would end the capture.
    if (!stream.marks.empty() && device_.drain(stream.marks.back().event) != CUDA_SUCCESS) return false;
  } else if (is_there || stream.recorded != Recorded::kAtOnce) {
    if (device_.drain(stream.handle) != CUDA_SUCCESS) return false;
  } else if (stream.over < issued) {
    // Only where the device was lost is there no mark.
    if (stream.marks.empty() || stream.marks.back().number < issued) return false;
    if (device_.drain(stream.marks.back().event) != CUDA_SUCCESS) return false;
  }
  stream.over = std::max(stream.over, issued);
  for (const Mark& mark : stream.marks) events_.push_back(mark.event);
  stream.marks.clear();
  return true;
}

// Where the device is lost the moment is not over, and whoever waits for it later is told so.
void StreamOrder::end_now(Stream& stream) {
  if (!device_.lost() && !device_.captures(stream.handle)) (void)drain(stream, true);
}

void StreamOrder::mark(uint32_t index) {
  // Where the device is lost there is no mark, and whoever waits for this moment later is told so.
  if (!device_.lost()) (void)set_mark(index);
}

bool StreamOrder::set_mark(uint32_t index, bool moves) {
  Stream& stream = streams_[index];
  if (stream.over == stream.issued) return true;
  if (!stream.marks.empty() && stream.marks.back().number == stream.issued) {
    stream.marks.back().moves &= moves;
    return true;
  }
  device_.bind_thread();
  // Nothing that is enqueued on it now runs, and an event would become part of the graph. Functions before have theirs, as
  // the default stream, which has none, cannot be captured.
  if (device_.captures(stream.handle)) {
    if (stream.marks.empty()) stream.over = stream.issued;
    else stream.marks.back().number = stream.issued;
    return true;
  }
  constexpr size_t kMostMarks = 64;
  if (stream.marks.size() > kMostMarks) collect(stream);
  const bool again = !stream.marks.empty() && stream.marks.back().moves;
  const CUevent event = again ? stream.marks.back().event : take_event();
  if (event != nullptr) {
    const auto record = [&] { return driver().cuEventRecord(event, stream.handle); };
    const bool recorded = driver().retried(Counted::kEventRecord, record) == CUDA_SUCCESS;
    if (again) stream.marks.pop_back();
    if (recorded) {
      stream.marks.push_back({stream.issued, event, moves});
      return true;
    }
    events_.push_back(event);
  }
  return drain(stream, true);
}

bool StreamOrder::find_mark(uint32_t index, uint64_t number, const Mark*& mark) {
  Stream& stream = streams_[index];
  mark = nullptr;
  if (number <= stream.over) return true;
  if (device_.lost()) return false;
  if ((stream.marks.empty() || stream.marks.back().number < number) && !set_mark(index)) return false;
  if (number <= stream.over) return true;
  const auto found = std::lower_bound(stream.marks.begin(), stream.marks.end(), number,
                                      [](const Mark& known, uint64_t value) { return known.number < value; });
  found->moves = false;
  mark = &*found;
  return true;
}

bool StreamOrder::make_wait(uint32_t waiter, const Moments& moments, Edge edge) {
  if (omitted(edge)) return true;
  for (const Moment& moment : moments) {
    if (comes_after(waiter, moment)) continue;
    const uint32_t source = moment.stream;
    Stream& waiting = streams_[waiter];
    if (waiting.waits.size() <= source) waiting.waits.resize(streams_.size());
    const Mark* mark = nullptr;
    if (!find_mark(source, moment.number, mark)) return false;
    if (mark == nullptr) continue;
    const uint64_t number = mark->number;
    device_.bind_thread();
    const auto wait = [&] { return driver().cuStreamWaitEvent(waiting.handle, mark->event, 0); };
    const bool made = driver().retried(Counted::kStreamWaitEvent, wait) == CUDA_SUCCESS;
    if (!made && !drain(streams_[source])) return false;
    waiting.waits[source] = number;
  }
  return true;
}

CUresult StreamOrder::ask(const Moments& moments) {
  if (device_.lost()) return CUDA_ERROR_NOT_READY;
  for (const Moment& moment : moments) {
    Stream& stream = streams_[moment.stream];
    if (moment.number <= stream.over) continue;
    device_.bind_thread();
    const Mark* mark = nullptr;
    if (!find_mark(moment.stream, moment.number, mark)) return CUDA_ERROR_NOT_READY;
    if (mark == nullptr) continue;
    const CUresult result = collect(stream);
    if (moment.number > stream.over) return result;
  }
  return CUDA_SUCCESS;
}

void StreamOrder::prune(Moments& moments) {
  moments.forget([this](const Moment& moment) { return moment.number <= streams_[moment.stream].over; });
}

bool StreamOrder::synchronize(const Moments& moments, Edge edge) {
  if (omitted(edge)) return true;
  for (const Moment& moment : moments) {
    Stream& stream = streams_[moment.stream];
    const Mark* mark = nullptr;
    if (!find_mark(moment.stream, moment.number, mark)) return false;
    if (mark == nullptr) continue;
    device_.bind_thread();
    const uint64_t number = mark->number;
    if (device_.await(mark->event) == CUDA_SUCCESS) stream.over = std::max(stream.over, number);
    else if (!drain(stream)) return false;
    collect(stream);
  }
  return true;
}

bool StreamOrder::synchronize(std::unique_lock<std::mutex>& lock, const Moments& moments, Edge edge) {
  if (omitted(edge)) return true;
  lock.unlock();
  const CUresult result = device_.await([&] {
    const std::lock_guard<std::mutex> again(*lock.mutex());
    return ask(moments);
  });
  lock.lock();
  return result == CUDA_SUCCESS || synchronize(moments, edge);  // which can do without events
}

bool StreamOrder::all_over() {
  device_.bind_thread();
  for (Stream& stream : streams_)
    if (stream.recorded == Recorded::kAtOnce ? collect(stream) != CUDA_SUCCESS || stream.over < stream.issued
                                             : driver().cuStreamQuery(stream.handle) != CUDA_SUCCESS)
      return false;
  for (Stream& stream : streams_) {
    stream.over = stream.issued;
    for (const Mark& mark : stream.marks) events_.push_back(mark.event);
    stream.marks.clear();
  }
  return true;
}

std::string StreamOrder::audit() const {
  AuditCheck check;
  for (const Stream& stream : streams_) {
    uint64_t before = 0;
    for (const Mark& mark : stream.marks) {
      check.none("marks of a stream out of order", mark.number <= before);
      before = mark.number;
    }
    check.none("marks of work that was not enqueued", before > stream.issued);
    check.none("work over that was not enqueued", stream.over > stream.issued);
    for (size_t source = 0; source < stream.waits.size(); ++source)
      check.none("waits for work that was not enqueued", stream.waits[source] > streams_[source].issued);
  }
  return check.text();
}

bool StreamOrder::synchronize_all() {
  for (Stream& stream : streams_)
    if (!drain(stream)) return false;
  return true;
}

}  // namespace ooc
