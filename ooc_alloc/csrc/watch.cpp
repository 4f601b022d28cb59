#include "watch.h"

#include <algorithm>

#include "clock.h"

namespace ooc {

void Watch::start(uint64_t capacity) {
  timeline_.start(capacity);
  last_memory_ = {};
  watched_ = true;
}

void Watch::stop(Threads& threads) {
  for (ThreadState& thread : threads.all()) close_function(thread);
  timeline_.stop();
  watched_ = ranges_.on();
}

uint32_t Watch::read(Threads& threads, uint64_t* from, ooc_event* events, uint32_t count, ooc_timeline* state) {
  for (ThreadState& thread : threads.all()) close_function(thread);
  *state = {timeline_.capacity(), timeline_.recorded(), timeline_.lost(), timeline_.next(), now_seconds(),
            timeline_.on() ? 1u : 0u, 0};
  return timeline_.read(from, events, count);
}

bool Watch::load_ranges(const char* library, std::string& reason) {
  if (!ranges_.load(library, reason)) return false;
  watched_ = true;
  return true;
}

ooc_event Watch::make(uint32_t kind, double start, double end) const {
  const Recorder& recorder = iterations_.recorder();
  ooc_event event{};
  event.start = start;
  event.end = end;
  event.kind = static_cast<uint16_t>(kind);
  event.index = static_cast<int32_t>(recorder.current().functions()) - 1;
  event.variable = event.region = -1;
  event.iteration = static_cast<uint32_t>(recorder.iteration());
  event.function = OOC_NO_FUNCTION;
  return event;
}

void Watch::name_variable(ooc_event& event, const Region* region) {
  event.region = static_cast<int32_t>(region->index);
  event.variable = region->variable;
  event.iteration = static_cast<uint32_t>(region->iteration);
}

void Watch::close_function(ThreadState& thread) {
  const double ended = thread.ended;
  if (thread.event == Timeline::kNoEvent || ended == 0) return;
  if (ooc_event* event = timeline_.at(thread.event)) event->end = std::max(event->start, ended);
  thread.event = Timeline::kNoEvent;
}

void Watch::function_ended(ThreadState& thread) {
  thread.ended = now_seconds();
  pop();
}

void Watch::function_began(ThreadState& thread, bool recorded, bool enqueued) {
  push(iterations_.recorder().function_name(thread.function));
  if (!recording()) return;
  const double start = now_seconds();
  close_function(thread);
  memory(start);
  ooc_event event = make(OOC_EVENT_FUNCTION, start, Timeline::kNotOver);
  event.function = thread.function;
  event.thread = thread.number;
  if (!recorded) event.index = -1;
  if (enqueued) event.flags |= OOC_EVENT_ENQUEUED;
  thread.ended = 0;
  thread.event = timeline_.add(event);
}

void Watch::memory(double now) {
  if (!recording()) return;
  const uint64_t cached = table_.cached_chunks();
  const MemoryState state{pool_.created() - pool_.free() - cached, pool_.free(), cached};
  if (state == last_memory_) return;
  last_memory_ = state;
  ooc_event event = make(OOC_EVENT_MEMORY, now, now);
  event.bytes = state.used * geometry_.chunk_bytes;
  event.free_bytes = state.free * geometry_.chunk_bytes;
  event.cached_bytes = state.cached * geometry_.chunk_bytes;
  event.live_bytes = live_bytes();
  timeline_.add(event);
}

uint64_t Watch::copy(const Region* region, Direction direction, double start, bool on_demand) {
  if (!recording()) return Timeline::kNoEvent;
  const uint32_t kind = direction == Direction::kOut ? OOC_EVENT_COPY_OUT : OOC_EVENT_COPY_IN;
  ooc_event event = make(kind, start, Timeline::kNotOver);
  name_variable(event, region);
  if (on_demand) event.flags |= OOC_EVENT_ON_DEMAND;
  return timeline_.add(event);
}

void Watch::dropped(const Piece& slots) {
  if (!recording()) return;
  const double now = now_seconds();
  ooc_event event = make(OOC_EVENT_DROP, now, now);
  name_variable(event, slots.region);
  event.bytes = geometry_.bytes_in(slots.region, slots.first, slots.count);
  if (slots.on_demand) event.flags |= OOC_EVENT_ON_DEMAND;
  timeline_.add(event);
  memory(now);
}

void Watch::variable(uint32_t kind, const Region* region, uint64_t live_after) {
  const double now = now_seconds();
  ooc_event event = make(kind, now, now);
  name_variable(event, region);
  event.bytes = region->bytes;
  event.address = reinterpret_cast<uintptr_t>(geometry_.address(region));
  event.live_bytes = live_after;
  timeline_.add(event);
}

uint64_t Watch::stall(double start, double end, const Region* waited_for, const ThreadState* thread) {
  if (!recording()) return Timeline::kNoEvent;
  ooc_event event = make(waited_for != nullptr ? OOC_EVENT_STALL_SWAP_IN : OOC_EVENT_STALL_ROOM, start, end);
  if (thread != nullptr) {
    event.thread = thread->number;
    if (thread->in_function) event.function = thread->function;
    if (!iterations_.records(thread)) event.index = -1;
  }
  if (waited_for != nullptr) name_variable(event, waited_for);
  return timeline_.add(event);
}

void Watch::iteration(const Trace& ended, double start, double end, bool followed_plan) {
  if (!recording()) return;
  ooc_event event = make(OOC_EVENT_ITERATION, start, end);
  event.index = static_cast<int32_t>(ended.functions());
  event.iteration = static_cast<uint32_t>(iterations_.recorder().iteration() - 1);
  event.bytes = ended.fingerprint;
  if (!followed_plan) event.flags |= OOC_EVENT_ON_DEMAND;
  timeline_.add(event);
}

}  // namespace ooc
