// A region: the address range of one variable, chunk by chunk on the device, in the host copy, or in both.
//
// A slot is pinned by the pins of its region, which are on every slot (a function that uses the whole variable), and by
// its own (a function that uses a range of it). A slot may also be kept in host memory, where a function uses it in
// place: nobody brings it in meanwhile.
//
// Invariants: a slot of a live region has a chunk, or is host_valid, or is blank; resident and arriving slots hold
// distinct chunks; a pinned slot does not become swapped, and one that is kept gets no chunk. So only a slot with a
// chunk is ever marked as written. Whoever makes a slot leave or arrive owns that transition and ends it; everybody
// else waits or goes on (reading or writing a leaving slot is allowed, and cancels the transition).
//
// Where functions run on streams, a state is what holds once all that was enqueued is done: a transition ends when its
// copy has been enqueued, and the moments of the region order whoever comes next (stream_order.h).
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "chunk_pool.h"
#include "moments.h"

namespace ooc {

enum class SlotState : uint8_t {
  kSwapped,      // no chunk: the bytes are in the host copy, or nowhere if the variable was freed
  kBlank,        // no chunk and no host copy: the slot was never written, and comes in without a copy
  kArriving,     // has a chunk that nobody may use; the bytes are in the host copy, and are copied to the device, or the
                 // chunk is being unmapped
  kResident,     // has a chunk with the bytes; the host copy has them too if host_valid
  kLeaving,      // as resident; a copy to the host is under way, after which the slot is swapped
  kWritingBack,  // as resident; a copy to the host is under way, after which the slot is resident
};

struct Slot {
  Chunk chunk = kNoChunk;
  SlotState state = SlotState::kSwapped;
  bool host_valid = false;   // the host copy has the bytes
  bool overwritten = false;  // written since the copy to the host began, which is for nothing then
  bool host_mapped = false;  // the slot's address leads to its host copy, which a function uses in place
  uint16_t pins = 0;         // of functions that use a range with the slot, beside the region's
  uint16_t kept = 0;         // functions that use the slot in host memory
  uint32_t iteration = 0;    // the last one in which a range with the slot was used (low bits)

  bool has_chunk() const { return chunk != kNoChunk; }
  bool blank() const { return state == SlotState::kBlank; }
  bool arriving() const { return state == SlotState::kArriving; }
  bool resident() const { return state >= SlotState::kResident; }
  bool at_rest() const { return state == SlotState::kResident; }
  bool copied_out() const { return state > SlotState::kResident; }  // a copy to the host is under way
  bool moving() const { return arriving() || copied_out(); }
  bool may_come() const { return !has_chunk() && kept == 0; }

  void put(Chunk with, SlotState in) {
    chunk = with;
    state = in;
  }
  // The slot has no chunk any more.
  Chunk take() {
    const Chunk taken = chunk;
    put(kNoChunk, SlotState::kSwapped);
    return taken;
  }
};

// What of a region comes before its next use on another stream. Empty where functions run on the host.
struct RegionOrder {
  Moments uses;       // functions that read or wrote the region
  Moments arrival;    // its copies in, and who used its chunks before: every use waits for them
  // The same of some slots, beside what is of the whole: a function that uses one range must not wait for the copy of
  // another, nor a copy for the use of another.
  struct Part {
    uint32_t first, count;
    Moments uses, arrival;

    bool overlaps(uint32_t from, uint32_t slots) const { return first < from + slots && from < first + count; }
  };
  std::vector<Part> parts;  // where functions use ranges
  Moments out;        // its copies out: they may be settled in another order than they were enqueued in
  struct Stale {      // slots that lost their chunk and are still mapped to it
    uint32_t first, count;
    Moments after;

    uint32_t end() const { return first + count; }
  };
  std::vector<Stale> stale;
};

struct Shift;  // host_copies.h

struct Region {
  uint32_t index = 0;         // among the core's regions
  uint64_t first = 0;         // address, in chunks from the base
  uint32_t count = 0;         // chunks
  uint64_t bytes = 0;         // as requested
  std::vector<Slot> slots;    // [count]
  uint32_t resident = 0;      // slots that are resident
  uint32_t moving = 0;        // slots that move
  uint32_t host_valid = 0;    // slots whose host copy is valid
  uint32_t pins = 0;          // of the whole: functions, their aftermath, and users
  uint32_t external_pins = 0; // of these, users'
  uint32_t writable_pins = 0; // of these, the ones that may write at any time
  uint32_t pinned_slots = 0;  // slots with pins of their own
  uint32_t generation = 0;    // counts the variables that lived here
  bool live = false;
  bool cached = false;        // freed, and in the table's list of those that keep their chunks
  bool leaky = false;         // a slot's mapping could not be undone: its addresses are not used again
  bool doomed = false;        // freed while moving; the owner of the transition disposes of the region
  bool in_ranges = false;     // functions use ranges of it: parts of it may leave while others move
  char* host = nullptr;       // block of `bytes` in the host arena, or null
  uint64_t use_serial = 0;    // last function that pinned the region, to find duplicates among its operands
  uint64_t write_serial = 0;  // last function that declared to write the region, all of it
  uint32_t group = 0;         // its number among the variables of that function, if it uses ranges
  uint64_t iteration = 0;     // last iteration that saw the region
  uint64_t whole_iteration = 0;  // last iteration that used it as a whole
  int32_t variable = -1;      // its id there
  uint32_t last_function = 0;
  uint32_t place = 0;         // in the user's program, where it was allocated
  RegionOrder order;
  Region* older = nullptr;    // neighbours in the list of use, or of cached regions
  Region* newer = nullptr;
  // Where host memory has a file below it; last, as nobody else looks at them.
  char* below = nullptr;      // block in the file, or null
  bool below_valid = false;   // which has all that is valid of the host copies
  uint32_t lifted = 0;        // who needs the block in host memory now
  Shift* shift = nullptr;     // the block is on its way between host memory and the file

  bool fully_resident() const { return resident == count; }
};

// A run of slots of one region.
struct Piece {
  Region* region = nullptr;
  uint32_t first = 0, count = 0;
  bool on_demand = false;  // no plan asked for it to move

  uint32_t end() const { return first + count; }
  std::span<Slot> slots() const { return std::span(region->slots).subspan(first, count); }
  static Piece whole(Region* region) { return {region, 0, region->count}; }
};

// Visits the longest runs of slots that have the same `key`, in order: visit(run, key) returns whether to go on.
// Returns whether all were visited.
template <class Key, class Visit>
bool each_run(const Piece& piece, Key key, Visit visit) {
  const std::span<Slot> slots = piece.slots();
  for (uint32_t first = 0, end = 0; first < piece.count; first = end) {
    const auto same = std::invoke(key, slots[first]);
    while (end < piece.count && std::invoke(key, slots[end]) == same) ++end;
    if (!visit(Piece{piece.region, piece.first + first, end - first, piece.on_demand}, same)) return false;
  }
  return true;
}

// The variable that lived in a region when the handle was made. It is null once that variable is freed.
struct RegionHandle {
  Region* region = nullptr;
  uint32_t generation = 0;

  Region* get() const { return region != nullptr && region->generation == generation && region->live ? region : nullptr; }
};

// A pin that a thread holds, of a whole variable or of a run of its slots.
struct Hold : RegionHandle {
  uint32_t first = 0;
  uint32_t count = 0;   // 0: the whole variable
  bool reads = false, writes = false;  // of runs: what the function does with them
  bool kept = false;    // of runs: they are used in host memory, and stay there

  bool whole() const { return count == 0; }
  uint32_t end(const Region* of) const { return count == 0 ? of->count : first + count; }
  Piece slots(Region* of) const { return {of, first, end(of) - first}; }
  // Whether all that is held is on the device. `of` is the region, which is alive.
  bool resident(const Region* of) const {
    return of->fully_resident() || (!whole() && std::ranges::all_of(run_of(of), &Slot::resident));
  }
  // How many of the slots have no chunk; those that are kept in host memory need none.
  uint32_t absent(const Region* of) const {
    return kept ? 0 : static_cast<uint32_t>(std::ranges::count(run_of(of), false, &Slot::has_chunk));
  }

 private:
  std::span<const Slot> run_of(const Region* of) const { return std::span(of->slots).subspan(first, end(of) - first); }
};

// Intrusive, oldest first.
class RegionList {
 public:
  Region* oldest() const { return oldest_; }
  Region* newest() const { return newest_; }
  void append(Region* region) {
    region->older = newest_;
    region->newer = nullptr;
    (newest_ != nullptr ? newest_->newer : oldest_) = region;
    newest_ = region;
  }
  void remove(Region* region) {
    (region->older != nullptr ? region->older->newer : oldest_) = region->newer;
    (region->newer != nullptr ? region->newer->older : newest_) = region->older;
    region->older = region->newer = nullptr;
  }
  void touch(Region* region) {
    if (newest_ == region) return;
    remove(region);
    append(region);
  }

 private:
  Region* oldest_ = nullptr;
  Region* newest_ = nullptr;
};

}  // namespace ooc
