// What the core writes into the timeline, and shows as NVTX ranges. Where nobody watches, a function pays for one look
// at a flag. Guarded by the core's lock, but for watched() and function_ended().
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "chunk_pool.h"
#include "geometry.h"
#include "iterations.h"
#include "place_names.h"
#include "region_table.h"
#include "slabs.h"
#include "thread_state.h"
#include "threads.h"
#include "timeline.h"

namespace ooc {

class Watch {
 public:
  // Reads what the others keep, and changes nothing there but times of events.
  Watch(Timeline& timeline, const Geometry& geometry, const Iterations& iterations, const ChunkPool& pool,
        const RegionTable& table, const Slabs& slabs)
      : timeline_(timeline), geometry_(geometry), iterations_(iterations), pool_(pool), table_(table), slabs_(slabs) {}

  // Whether functions have to be told, to the timeline or as NVTX ranges.
  bool watched() const { return __builtin_expect(watched_.load(std::memory_order_relaxed), false); }
  bool recording() const { return timeline_.on(); }

  void start(uint64_t capacity);
  void stop(Threads& threads);
  uint32_t read(Threads& threads, uint64_t* from, ooc_event* events, uint32_t count, ooc_timeline* state);
  // Returns false if the library or its functions are not there; `reason` says which.
  bool load_ranges(const char* library, std::string& reason);

  // ---- what happened; all but functions only while recording()
  [[gnu::cold]] void function_began(ThreadState& thread, bool recorded, bool enqueued);
  [[gnu::cold]] void function_ended(ThreadState& thread);
  // The thread's last function is over: it left the time, as its end takes no lock.
  void close_function(ThreadState& thread);
  // Chunks in use, free and cached, if they have changed.
  void memory(double now);
  // Its time and its bytes are filled in when the copy is over (event()). kNoEvent where nobody records.
  uint64_t copy(const Region* region, Direction direction, double start, bool on_demand);
  void dropped(const Piece& slots);
  void allocated(const Region* region) {
    if (recording()) variable(OOC_EVENT_ALLOCATED, region, live_bytes());
  }
  // The variable is still among the live ones.
  void freed(const Region* region) {
    if (recording()) variable(OOC_EVENT_FREED, region, live_bytes() - region->bytes);
  }
  uint64_t stall(double start, double end, const Region* waited_for, const ThreadState* thread);
  void iteration(const Trace& ended, double start, double end, bool followed_plan);
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
  ooc_event make(uint32_t kind, double start, double end) const;
  static void name_variable(ooc_event& event, const Region* region);
  void variable(uint32_t kind, const Region* region, uint64_t live_bytes);
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
