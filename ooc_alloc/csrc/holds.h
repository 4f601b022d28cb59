// What stays on the device: pins of functions on variables or on runs of their slots, and pins of users. A thread's
// holds outlast its function; they end when the thread's next function begins. Guarded by the core's lock.
//
//   pinned_chunks() == slots that are pinned by their region or by themselves
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "audit_check.h"
#include "geometry.h"
#include "ooc_alloc.h"
#include "region_table.h"
#include "threads.h"

namespace ooc {

constexpr uint64_t kNoToken = ~uint64_t{0};  // of a user's pin: unpin does nothing
constexpr uint64_t kOfSlabs = uint64_t{1} << 63;  // in a token: the rest is of Slabs::pin

class Holds {
 public:
  explicit Holds(const Geometry& geometry) : geometry_(geometry) {}

  // ---- functions
  void add(const Hold& hold) {
    if (hold.whole()) pin(hold.region);
    else pin_run(hold);
  }
  // A variable as a whole, for a thread's function; for a thread that never runs functions, null, until no function
  // runs.
  void add(Region* region, ThreadState* thread) {
    pin(region);
    list_of(thread).push_back({{region, region->generation}});
  }
  // Ends all holds of a list, or the newest if it is one on this variable.
  void release(std::vector<Hold>& held) {
    for (const Hold& hold : held) {
      if (hold.get() == nullptr) continue;
      if (hold.whole()) unpin(hold.region);
      else unpin_run(hold);
    }
    held.clear();
  }
  void release_newest(Region* region, ThreadState* thread) {
    std::vector<Hold>& held = list_of(thread);
    if (held.empty() || held.back().get() != region) return;
    held.pop_back();
    unpin(region);
  }
  // Ends what threads allocated that never run functions (a kernel's helpers). Returns false if there was nothing.
  bool release_orphans() {
    if (orphans_.empty()) return false;
    release(orphans_);
    return true;
  }
  bool has_orphans() const { return !orphans_.empty(); }

  // ---- users
  // gives its token
  uint64_t pin_for_user(Region* region, uint32_t access) {
    keep(region);
    if (access & OOC_WRITE) ++region->writable_pins;
    return uint64_t{region->index} << 32 | region->generation;
  }
  // The variable of a token, or null if it is gone.
  static Region* of_token(RegionTable& table, uint64_t token) {
    return RegionHandle{table.numbered(token >> 32), static_cast<uint32_t>(token)}.get();
  }
  void unpin_for_user(Region* region, uint32_t access) {
    if (access & OOC_WRITE && region->writable_pins > 0) --region->writable_pins;
    --region->external_pins;
    unpin(region);
  }
  // The pin of a function becomes one of a user, beside it, until the variable is freed.
  void keep(Region* region) {
    pin(region);
    ++region->external_pins;
    ++user_pins_;
  }

  // The variable is freed, and every pin on it with it.
  void freed(Region* region) {
    pinned_chunks_ -= region->pins > 0 ? region->count : region->pinned_slots;
    region->pins = region->external_pins = region->writable_pins = region->pinned_slots = 0;
  }

  uint64_t pinned_chunks() const { return pinned_chunks_; }
  // The budget that what is pinned now would need, beside slabs in use, or any moment before. The budget in force, `limit`,
  // is enough: what is pinned beyond it waits for room, and is not needed beside what runs.
  void note_need(uint64_t slab_chunks, uint64_t limit) {
    // With less than twice the slabs, small variables would take chunks of their own.
    note_budget(std::min(slab_chunks + std::max(pinned_chunks_, slab_chunks), limit));
  }
  void note_budget(uint64_t chunks) { least_budget_chunks_ = std::max(least_budget_chunks_, chunks); }
  uint64_t least_budget_chunks() const { return least_budget_chunks_; }

  void fill(ooc_stats& stats) const {
    stats.pinned_bytes = pinned_chunks_ * geometry_.chunk_bytes;
    stats.min_budget_bytes = least_budget_chunks_ * geometry_.chunk_bytes;
    stats.external_pin_count = user_pins_;
  }
  // What threads hold and users pinned, against the pins of regions and of slots.
  std::string audit(const Threads& threads, const RegionTable& table) const {
    AuditCheck check;
    struct Pins {
      uint64_t whole = 0;
      std::vector<uint64_t> own, kept;  // [slots] by holds of ranges
    };
    std::unordered_map<const Region*, Pins> held;
    const auto count = [&held](const std::vector<Hold>& holds) {
      for (const Hold& hold : holds) {
        const Region* region = hold.get();
        if (region == nullptr) continue;
        Pins& pins = held[region];
        pins.own.resize(region->count);
        pins.kept.resize(region->count);
        if (hold.whole()) ++pins.whole;
        for (uint32_t i = hold.first; !hold.whole() && i < hold.end(region); ++i) ++(hold.kept ? pins.kept : pins.own)[i];
      }
    };
    for (const ThreadState& thread : threads.all()) count(thread.held);
    count(orphans_);
    uint64_t pinned = 0;
    for (const Region& region : table.all()) {
      if (!region.live) continue;
      const Pins pins = held[&region];
      uint64_t own = 0;
      check.equal("pins of a region", pins.whole + region.external_pins, region.pins);
      for (uint32_t i = 0; i < region.count; ++i) {
        own += region.slots[i].pins > 0 ? 1 : 0;
        check.equal("pins of a slot", pins.own.empty() ? 0 : pins.own[i], region.slots[i].pins);
        check.equal("keeps of a slot", pins.kept.empty() ? 0 : pins.kept[i], region.slots[i].kept);
      }
      check.equal("slots with pins of their own", own, region.pinned_slots);
      pinned += region.pins > 0 ? region.count : own;
    }
    check.equal("pinned chunks", pinned, pinned_chunks_);
    return check.text();
  }

 private:
  void pin(Region* region) {
    if (region->pins++ == 0) pinned_chunks_ += region->count - region->pinned_slots;
  }
  void unpin(Region* region) {
    if (--region->pins == 0) pinned_chunks_ -= region->count - region->pinned_slots;
  }
  void pin_run(const Hold& hold) {
    Region* region = hold.region;
    const Piece piece = hold.slots(region);
    for (Slot& slot : piece.slots()) {
      if (hold.kept) {
        ++slot.kept;
      } else if (slot.pins++ == 0) {
        ++region->pinned_slots;
        if (region->pins == 0) ++pinned_chunks_;
      }
    }
  }
  void unpin_run(const Hold& hold) {
    Region* region = hold.region;
    const Piece piece = hold.slots(region);
    for (Slot& slot : piece.slots()) {
      if (hold.kept) {
        --slot.kept;
      } else if (--slot.pins == 0) {
        --region->pinned_slots;
        if (region->pins == 0) --pinned_chunks_;
      }
    }
  }
  std::vector<Hold>& list_of(ThreadState* thread) { return thread != nullptr ? thread->held : orphans_; }

  const Geometry& geometry_;
  std::vector<Hold> orphans_;
  uint64_t pinned_chunks_ = 0, least_budget_chunks_ = 0;
  uint64_t user_pins_ = 0;  // so far
};

}  // namespace ooc
