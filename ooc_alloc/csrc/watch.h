// What the core writes into the timeline, and shows as NVTX ranges. Where nobody watches, a function pays for one look
// at a flag. Guarded by the core's lock, but for watched() and function_ended().
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <unordered_map>

#include "chunk_pool.h"
#include "clock.h"
#include "geometry.h"
#include "iterations.h"
#include "region_table.h"
#include "slabs.h"
#include "thread_state.h"
#include "threads.h"
#include "timeline.h"

namespace ooc {

// Places in the user's program, as texts of the integration's, and numbers for them.
class PlaceNames {
 public:
  // Returns 0 if there are too many texts.
  uint32_t id(const char* text) {
    constexpr size_t kMostPlaces = 1 << 16;
    const auto known = ids_.find(text);
    if (known != ids_.end()) return known->second;
    if (texts_.size() >= kMostPlaces) return 0;
    texts_.emplace_back(text);
    return ids_[text] = static_cast<uint32_t>(texts_.size() - 1);
  }
  // Returns null if there is no such place.
  const char* text(uint32_t id) const { return id < texts_.size() ? texts_[id].c_str() : nullptr; }

 private:
  std::deque<std::string> texts_{""};
  std::unordered_map<std::string, uint32_t> ids_{{"", 0}};
};

class Watch {
 public:
  // Reads what the others keep, and changes nothing there but times of events.
  Watch(Timeline& timeline, const Geometry& geometry, const Iterations& iterations, const ChunkPool& pool,
        const RegionTable& table, const Slabs& slabs)
      : timeline_(timeline), geometry_(geometry), iterations_(iterations), pool_(pool), table_(table), slabs_(slabs) {}

  // Whether functions have to be told, to the timeline or as NVTX ranges.
  bool watched() const { return __builtin_expect(watched_.load(std::memory_order_relaxed), false); }
  bool recording() const { return timeline_.on(); }

  void start(uint64_t capacity) {
    timeline_.start(capacity);
    last_memory_ = {};
    watched_ = true;
  }
  void stop(Threads& threads) {
    for (ThreadState& thread : threads.all()) close_function(thread);
    timeline_.stop();
    watched_ = ranges_.on();
  }
  uint32_t read(Threads& threads, uint64_t* from, ooc_event* events, uint32_t count, ooc_timeline* state) {
    for (ThreadState& thread : threads.all()) close_function(thread);
    *state = {timeline_.capacity(), timeline_.recorded(), timeline_.lost(), timeline_.next(), now_seconds(),
              timeline_.on() ? 1u : 0u, 0};
    return timeline_.read(from, events, count);
  }
  // Returns false if the library or its functions are not there; `reason` says which.
  bool load_ranges(const char* library, std::string& reason) {
    if (!ranges_.load(library, reason)) return false;
    watched_ = true;
    return true;
  }

  // ---- what happened; all but functions only while recording()
  [[gnu::cold]] void function_began(ThreadState& thread, bool recorded, bool enqueued) {
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
  [[gnu::cold]] void function_ended(ThreadState& thread) {
    thread.ended = now_seconds();
    pop();
  }
  // The thread's last function is over: it left the time, as its end takes no lock.
  void close_function(ThreadState& thread) {
    const double ended = thread.ended;
    if (thread.event == Timeline::kNoEvent || ended == 0) return;
    if (ooc_event* event = timeline_.at(thread.event)) event->end = std::max(event->start, ended);
    thread.event = Timeline::kNoEvent;
  }
  // Chunks in use, free and cached, if they have changed.
  void memory(double now) {
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
  // Its time and its bytes are filled in when the copy is over (event()). kNoEvent where nobody records.
  uint64_t copy(const Region* region, Direction direction, double start, bool on_demand) {
    if (!recording()) return Timeline::kNoEvent;
    const uint32_t kind = direction == Direction::kOut ? OOC_EVENT_COPY_OUT : OOC_EVENT_COPY_IN;
    ooc_event event = make(kind, start, Timeline::kNotOver);
    name_variable(event, region);
    if (on_demand) event.flags |= OOC_EVENT_ON_DEMAND;
    return timeline_.add(event);
  }
  void dropped(const Piece& slots) {
    if (!recording()) return;
    const double now = now_seconds();
    ooc_event event = make(OOC_EVENT_DROP, now, now);
    name_variable(event, slots.region);
    event.bytes = geometry_.bytes_in(slots.region, slots.first, slots.count);
    if (slots.on_demand) event.flags |= OOC_EVENT_ON_DEMAND;
    timeline_.add(event);
    memory(now);
  }
  void allocated(const Region* region) {
    if (recording()) variable(OOC_EVENT_ALLOCATED, region, live_bytes());
  }
  // The variable is still among the live ones.
  void freed(const Region* region) {
    if (recording()) variable(OOC_EVENT_FREED, region, live_bytes() - region->bytes);
  }
  uint64_t stall(double start, double end, const Region* waited_for, const ThreadState* thread) {
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
  void iteration(const Trace& ended, double start, double end, bool followed_plan) {
    if (!recording()) return;
    ooc_event event = make(OOC_EVENT_ITERATION, start, end);
    event.index = static_cast<int32_t>(ended.functions());
    event.iteration = static_cast<uint32_t>(iterations_.recorder().iteration() - 1);
    event.bytes = ended.fingerprint;
    if (!followed_plan) event.flags |= OOC_EVENT_ON_DEMAND;
    timeline_.add(event);
  }
  // Null if nobody recorded the event, or it was overwritten.
  ooc_event* event(uint64_t position) { return timeline_.at(position); }

  // A stretch of time as an NVTX range, where somebody wants these.
  void push(const char* name) const {
    if (ranges_.on()) ranges_.push(name);
  }
  void pop() const {
    if (ranges_.on()) ranges_.pop();
  }

  PlaceNames& places() { return places_; }

 private:
  struct MemoryState {
    uint64_t used = 0, free = 0, cached = 0;  // chunks
    bool operator==(const MemoryState& other) const {
      return used == other.used && free == other.free && cached == other.cached;
    }
  };
  ooc_event make(uint32_t kind, double start, double end) const {
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
  static void name_variable(ooc_event& event, const Region* region) {
    event.region = static_cast<int32_t>(region->index);
    event.variable = region->variable;
    event.iteration = static_cast<uint32_t>(region->iteration);
  }
  void variable(uint32_t kind, const Region* region, uint64_t live_after) {
    const double now = now_seconds();
    ooc_event event = make(kind, now, now);
    name_variable(event, region);
    event.bytes = region->bytes;
    event.address = reinterpret_cast<uintptr_t>(geometry_.address(region));
    event.live_bytes = live_after;
    timeline_.add(event);
  }
  uint64_t live_bytes() const { return table_.live_bytes() + slabs_.live_bytes(); }

  Timeline& timeline_;
  const Geometry& geometry_;
  const Iterations& iterations_;
  const ChunkPool& pool_;
  const RegionTable& table_;
  const Slabs& slabs_;
  Ranges ranges_;
  std::atomic<bool> watched_{false};  // by the timeline, or for ranges
  MemoryState last_memory_;
  PlaceNames places_;
};

// A stretch of time that is shown as an NVTX range.
class ShownRange {
 public:
  ShownRange(const Watch& watch, const char* name) : watch_(watch) { watch_.push(name); }
  ~ShownRange() { watch_.pop(); }
  ShownRange(const ShownRange&) = delete;
  ShownRange& operator=(const ShownRange&) = delete;

 private:
  const Watch& watch_;
};

}  // namespace ooc
