// A region: the address range of one variable, chunk by chunk on the device, in the host copy, or in both.
//
//   slot state   chunk    arriving  leaving   the bytes are
//   resident     yes      no        no        on the device (and in the host copy too if host_valid)
//   leaving      yes      no        yes       on the device; a copy to the host is under way, after which the slot is
//                                             swapped, or, if it is `staying`, resident with a valid host copy
//   swapped      none     no        no        in the host copy (host_valid)
//   arriving     yes      yes       no        in the host copy; a copy to the device is under way
//   blank        none     no        no        nowhere: never written (ooc_core_malloc_absent). It comes in as a chunk
//                                             with whatever is there, without a copy, and is ordinary from then on
//
// A slot is pinned by the pins of its region, which are on every slot (a function that uses the whole variable), and by
// its own (a function that uses a range of it). A slot may also be kept in host memory, where a function uses it in
// place (host_functions.cpp): nobody brings it in meanwhile.
//
// Invariants: a slot of a live region has a chunk, or is host_valid, or is blank, and if it is blank it is neither;
// resident + arriving slots hold distinct chunks; a pinned slot does not become swapped, and one that is kept gets no
// chunk. So only a slot with a chunk is ever marked as written. Who sets leaving or arriving owns that transition and
// ends it; everybody else waits or goes on (reading or writing a leaving slot is allowed: it cancels).
//
// Where functions run on streams, "is" and "under way" mean the state once all that was enqueued is done: a transition
// ends when its copy has been enqueued, and the moments below order whoever comes next after it (stream_order.h).
#pragma once

#include <cstdint>
#include <vector>

#include "chunk_pool.h"
#include "moments.h"

namespace ooc {

class HostArena;

struct Slot {
  Chunk chunk = kNoChunk;
  bool host_valid = false;
  bool leaving = false;
  bool staying = false;  // of leaving slots: only the copy is wanted (a write-back)
  bool arriving = false;
  bool overwritten = false;  // of leaving slots: written since the copy began, which is for nothing then
  bool host_mapped = false;  // its address leads to its host copy, which a function uses in place
  bool blank = false;        // never written; neither place has it
  uint16_t pins = 0;         // of functions that use a range with it; beside the region's
  uint16_t kept = 0;         // functions that use it in host memory
  uint32_t iteration = 0;    // last one in which a range with it was used (low bits)

  bool resident() const { return chunk != kNoChunk && !arriving; }
  bool at_rest() const { return resident() && !leaving; }
};

struct Region {
  uint32_t index = 0;         // among the core's regions
  uint64_t first = 0;         // address, in chunks from the base
  uint32_t count = 0;         // chunks
  uint64_t bytes = 0;         // as requested
  std::vector<Slot> slots;    // [count]
  uint32_t resident = 0;      // slots with a chunk that are not arriving
  uint32_t moving = 0;        // slots leaving or arriving
  uint32_t host_valid = 0;    // slots whose host copy is valid
  uint32_t pins = 0;          // of the whole: functions, their aftermath, and users
  uint32_t external_pins = 0; // of these, users'
  uint32_t writable_pins = 0; // of these, the ones that may write at any time
  uint32_t pinned_slots = 0;  // slots with pins of their own
  uint32_t generation = 0;    // counts the variables that lived here
  bool live = false;
  bool leaky = false;         // a slot's mapping could not be undone: its addresses are not used again
  bool doomed = false;        // freed while moving; the owner of the transition disposes of it
  bool in_ranges = false;     // functions use ranges of it: parts of it may leave while others move
  char* host = nullptr;       // block of `bytes` in a host arena, or null
  HostArena* arena = nullptr; // that one
  uint64_t use_serial = 0;    // last function that pinned it, to find duplicates among its operands
  uint64_t write_serial = 0;  // last function that declared to write it, all of it
  uint32_t group = 0;         // its number among the variables of that function, if it uses ranges
  uint64_t iteration = 0;     // last iteration that saw it
  uint64_t whole_iteration = 0;  // last iteration that used it as a whole
  int32_t variable = -1;      // its id there
  uint32_t last_function = 0;
  uint32_t place = 0;         // in the user's program, where it was allocated
  Moments uses;               // functions that read or wrote it
  Moments arrival;            // its copies in, and what used its chunks before: to be waited for before every use
  struct Part {               // the same of some slots, beside what is of the whole
    uint32_t first, count;
    Moments uses, arrival;
  };
  std::vector<Part> parts;    // where functions use ranges
  Moment out;                 // its last copy out
  struct Stale {              // slots that lost their chunk and are still mapped to it
    uint32_t first, count;
    Moments after;
  };
  std::vector<Stale> stale;
  Region* older = nullptr;    // neighbours in the list of use, or of cached regions
  Region* newer = nullptr;

  bool fully_resident() const { return resident == count; }
  bool pinned(uint32_t slot) const { return pins > 0 || slots[slot].pins > 0; }
};

// A region at a time: the variable that lived there when the handle was made.
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
};

// Intrusive, oldest first.
class RegionList {
 public:
  Region* oldest() const { return oldest_; }
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
