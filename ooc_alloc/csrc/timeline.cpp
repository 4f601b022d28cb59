// The timeline, and what the core writes into it.
#include "timeline.h"

#include <dlfcn.h>

#include <algorithm>

#include "core.h"

namespace ooc {

void Timeline::start(uint64_t capacity) {
  constexpr uint64_t kLeast = 64, kMost = uint64_t{1} << 24;
  uint64_t size = kLeast;
  while (size < std::min(capacity, kMost)) size *= 2;
  std::vector<ooc_event> fresh(size);  // written once, so that its pages are there
  events_ = std::move(fresh);
  mask_ = size - 1;
  first_ = next_;
  on_.store(true, std::memory_order_relaxed);
}

uint32_t Timeline::read(uint64_t* from, ooc_event* events, uint32_t count) const {
  *from = std::min(std::max(*from, oldest()), next_);
  const auto found = static_cast<uint32_t>(std::min<uint64_t>(count, next_ - *from));
  for (uint32_t i = 0; i < found; ++i) events[i] = events_[(*from + i) & mask_];
  return found;
}

bool Ranges::load(const char* library, std::string& reason) {
  if (on()) return true;
  void* handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);  // never closed: its functions may be called at any time
  if (handle == nullptr) {
    reason = dlerror();
    return false;
  }
  push_ = reinterpret_cast<int (*)(const char*)>(dlsym(handle, "nvtxRangePushA"));
  pop_ = reinterpret_cast<int (*)()>(dlsym(handle, "nvtxRangePop"));
  if (push_ == nullptr || pop_ == nullptr) {
    reason = std::string(library) + " has no nvtxRangePushA or no nvtxRangePop";
    return false;
  }
  on_.store(true, std::memory_order_release);
  return true;
}

// ---- the core's part ------------------------------------------------------------------------------------------------

void Core::timeline_start(uint64_t capacity) {
  const RelaxedCaptures relaxed(order_ ? &device_ : nullptr);
  Lock lock(mutex_);
  if (forked_ || detached_) return;
  timeline_.start(capacity);
  last_memory_ = {};
  if (timer_) timer_->anchor(device_.stream(Direction::kOut), now_seconds());
  watched_ = true;
}

void Core::timeline_stop() {
  const RelaxedCaptures relaxed(order_ ? &device_ : nullptr);
  Lock lock(mutex_);
  if (timer_ && !forked_) timer_->collect();
  for (ThreadState& thread : thread_states_) close_function(thread);
  timeline_.stop();
  watched_ = ranges_.on();
}

uint32_t Core::timeline_read(uint64_t* from, ooc_event* events, uint32_t count, ooc_timeline* state) {
  const RelaxedCaptures relaxed(order_ ? &device_ : nullptr);
  Lock lock(mutex_);
  if (timer_ && !forked_) timer_->collect();
  for (ThreadState& thread : thread_states_) close_function(thread);
  *state = {timeline_.capacity(), timeline_.recorded(), timeline_.lost(), timeline_.next(), now_seconds(),
            timeline_.on() ? 1u : 0u, 0};
  return timeline_.read(from, events, count);
}

int Core::ranges_load(const char* library) {
  std::string reason;
  if (!ranges_.load(library, reason)) return fail(OOC_INVALID, reason);
  watched_ = true;
  return OOC_OK;
}

ooc_event Core::new_event(uint32_t kind, double start, double end) const {
  ooc_event event{};
  event.start = start;
  event.end = end;
  event.kind = static_cast<uint16_t>(kind);
  event.index = static_cast<int32_t>(recorder_.current().functions()) - 1;
  event.variable = event.region = -1;
  event.iteration = static_cast<uint32_t>(recorder_.iteration());
  event.function = OOC_NO_FUNCTION;
  return event;
}

void Core::name_variable(ooc_event& event, const Region* region) {
  event.region = static_cast<int32_t>(region->index);
  event.variable = region->variable;
  event.iteration = static_cast<uint32_t>(region->iteration);
}

// The thread's last function is over: it left the time, as its end takes no lock.
void Core::close_function(ThreadState& thread) {
  if (thread.event == Timeline::kNoEvent || thread.ended == 0) return;
  if (ooc_event* event = timeline_.at(thread.event)) event->end = std::max(event->start, thread.ended.value.load());
  thread.event = Timeline::kNoEvent;
}

void Core::watch_end(ThreadState& thread) {
  thread.ended = now_seconds();
  if (ranges_.on()) ranges_.pop();
}

void Core::watch_function(ThreadState& thread, bool recorded) {
  if (ranges_.on()) ranges_.push(recorder_.function_name(thread.function));
  if (!timeline_.on()) return;
  const double start = now_seconds();
  close_function(thread);
  watch_memory(start);
  ooc_event event = new_event(OOC_EVENT_FUNCTION, start, Timeline::kNotOver);
  event.function = thread.function;
  event.thread = thread.number;
  if (!recorded) event.index = -1;
  if (order_) event.flags |= OOC_EVENT_ENQUEUED;
  thread.ended = 0;
  thread.event = timeline_.add(event);
}

void Core::watch_memory(double now) {
  const MemoryState state{pool_->created() - pool_->free() - cached_chunks_, pool_->free(), cached_chunks_};
  if (state == last_memory_) return;
  last_memory_ = state;
  ooc_event event = new_event(OOC_EVENT_MEMORY, now, now);
  event.bytes = state.used * chunk_bytes_;
  event.free_bytes = state.free * chunk_bytes_;
  event.cached_bytes = state.cached * chunk_bytes_;
  event.live_bytes = stats_.live_bytes;
  timeline_.add(event);
}

// Its time and its bytes are filled in when it is over.
uint64_t Core::watch_copy(const Region* region, Direction direction, double start, bool on_demand) {
  ooc_event event = new_event(direction == Direction::kOut ? OOC_EVENT_COPY_OUT : OOC_EVENT_COPY_IN, start, Timeline::kNotOver);
  name_variable(event, region);
  if (on_demand) event.flags |= OOC_EVENT_ON_DEMAND;
  return timeline_.add(event);
}

void Core::watch_variable(uint32_t kind, const Region* region, uint64_t bytes) {
  const double now = now_seconds();
  ooc_event event = new_event(kind, now, now);
  name_variable(event, region);
  event.bytes = bytes;
  event.address = reinterpret_cast<uintptr_t>(device_.base()) + region->first * chunk_bytes_;
  event.live_bytes = stats_.live_bytes - (kind == OOC_EVENT_FREED ? bytes : 0);
  timeline_.add(event);
}

uint64_t Core::watch_stall(uint32_t kind, double start, double end, const Region* region) {
  ooc_event event = new_event(kind, start, end);
  const ThreadState* thread = find_thread_state();
  if (thread != nullptr) {
    event.thread = thread->number;
    if (thread->in_function) event.function = thread->function;
    if (thread != sequence_thread_) event.index = -1;
  }
  if (region != nullptr) name_variable(event, region);
  return timeline_.add(event);
}

void Core::watch_iteration(const Trace& ended, double start, double end, bool followed_plan) {
  ooc_event event = new_event(OOC_EVENT_ITERATION, start, end);
  event.index = static_cast<int32_t>(ended.functions());
  event.iteration = static_cast<uint32_t>(recorder_.iteration() - 1);
  event.bytes = ended.fingerprint;
  if (!followed_plan) event.flags |= OOC_EVENT_ON_DEMAND;
  timeline_.add(event);
}

// ---- places ---------------------------------------------------------------------------------------------------------

uint32_t Core::place_id(const char* text) {
  constexpr size_t kMostPlaces = 1 << 16;
  Lock lock(mutex_);
  const auto known = place_ids_.find(text);
  if (known != place_ids_.end()) return known->second;
  if (places_.size() >= kMostPlaces) return 0;
  places_.emplace_back(text);
  return place_ids_[text] = static_cast<uint32_t>(places_.size() - 1);
}

const char* Core::place_text(uint32_t place) {
  Lock lock(mutex_);
  return place < places_.size() ? places_[place].c_str() : nullptr;
}

void Core::set_place(const void* address, uint32_t place) {
  Lock lock(mutex_);
  Region* region = detached_ ? nullptr : find(address);
  if (region == nullptr) return;
  region->place = place;
  recorder_.set_place(region);
}

uint32_t Core::regions(ooc_region* found, uint32_t count) {
  Lock lock(mutex_);
  uint32_t live = 0;
  for (const Region& region : regions_) {
    if (!region.live) continue;
    if (live < count) {
      const auto address = reinterpret_cast<uintptr_t>(device_.base()) + region.first * chunk_bytes_;
      const uint32_t pins = region.pins + region.pinned_slots;
      found[live] = {address, region.bytes, region.count, region.resident, region.host_valid, pins, region.place, 0};
    }
    ++live;
  }
  return live;
}

}  // namespace ooc
