// A second route to the counters: walks every structure, trusting none of them.
#include <string>

#include "core.h"

namespace ooc {
namespace {

struct Check {
  std::string text;
  void equal(const char* what, uint64_t counted, uint64_t kept) {
    if (counted == kept) return;
    text += std::string(what) + ": counted " + std::to_string(counted) + ", kept " + std::to_string(kept) + "; ";
  }
};

}  // namespace

// What threads hold and users pinned, against the pins of regions and of slots.
std::string Core::audit_holds() const {
  Check check;
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
  for (const ThreadState& thread : thread_states_) count(thread.held);
  count(orphans_);
  for (const Region& region : regions_) {
    if (!region.live) continue;
    const Pins pins = held[&region];
    check.equal("pins of a region", pins.whole + region.external_pins, region.pins);
    for (uint32_t i = 0; i < region.count; ++i) {
      check.equal("pins of a slot", pins.own.empty() ? 0 : pins.own[i], region.slots[i].pins);
      check.equal("keeps of a slot", pins.kept.empty() ? 0 : pins.kept[i], region.slots[i].kept);
    }
  }
  return check.text;
}

int Core::audit() {
  Lock lock(mutex_);
  if (detached_) return OOC_OK;
  Check check;
  std::vector<bool> taken;
  uint64_t chunks = 0, duplicates = 0;
  auto hold_chunk = [&](Chunk chunk) {
    const auto index = static_cast<size_t>(chunk);
    if (taken.size() <= index) taken.resize(index + 1);
    duplicates += taken[index] ? 1 : 0;
    taken[index] = true;
    ++chunks;
  };
  uint64_t cached = 0, pinned = 0, live = 0, resident = 0, moving = 0, live_bytes = 0, host = 0;
  uint64_t all_arriving = 0, all_leaving = 0;
  for (const Region& region : regions_) {
    uint64_t with_chunk = 0, in_motion = 0, arriving = 0, valid = 0, own_pins = 0;
    for (const Slot& slot : region.slots) {
      if (slot.chunk != kNoChunk) {
        hold_chunk(slot.chunk);
        ++with_chunk;
      }
      if (slot.host_mapped && (slot.resident() || !(region.live || region.doomed)))
        check.equal("slots that show a host copy and should not", 1, 0);
      in_motion += slot.leaving || slot.arriving ? 1 : 0;
      arriving += slot.arriving ? 1 : 0;
      all_leaving += slot.leaving ? 1 : 0;
      valid += slot.host_valid ? 1 : 0;
      own_pins += slot.pins > 0 ? 1 : 0;
      if (!region.live) {
        if (slot.blank && !region.doomed) check.equal("blank slots of a freed region", 1, 0);
        continue;
      }
      if (slot.chunk == kNoChunk && !slot.host_valid && !slot.blank) check.equal("slots in neither place", 1, 0);
      if (slot.blank && (slot.host_valid || slot.resident())) check.equal("blank slots with bytes", 1, 0);
      if (slot.kept > 0 && (slot.chunk != kNoChunk || !slot.host_mapped))
        check.equal("slots kept in host memory and not there", 1, 0);
    }
    all_arriving += arriving;
    check.equal("resident slots of a region", with_chunk - arriving, region.resident);
    check.equal("moving slots of a region", in_motion, region.moving);
    if (region.live) check.equal("valid host slots of a region", valid, region.host_valid);
    if (region.live || region.doomed) {
      resident += with_chunk - arriving;
      moving += in_motion;
    } else {
      cached += with_chunk;
    }
    host += region.host != nullptr ? region.arena->rounded(region.bytes) : 0;
    if (!region.live) continue;
    live += region.count;
    live_bytes += region.bytes;
    check.equal("slots with pins of their own", own_pins, region.pinned_slots);
    pinned += region.pins > 0 ? region.count : own_pins;
  }
  uint64_t backed = 0, used = 0, small_bytes = 0;
  for (uint64_t c = 0; c < heap_top_; ++c) {
    const HeapChunk& entry = heap_chunks_[c];
    if (entry.chunk != kNoChunk) {
      hold_chunk(entry.chunk);
      ++backed;
    }
    used += entry.users > 0 ? 1 : 0;
  }
  heap_->each_allocation([&](uint64_t, uint64_t bytes) { small_bytes += bytes; });
  check.equal("chunks", chunks + pool_->free() + lost_chunks_, pool_->created());
  check.equal("chunks held twice", duplicates, 0);
  check.equal("cached chunks", cached, cached_chunks_);
  check.equal("pinned chunks", pinned, pinned_chunks_);
  check.text += audit_holds();
  check.equal("live region chunks", live, live_region_chunks_);
  check.equal("resident chunks", resident, resident_chunks_);
  check.equal("moving slots", moving, moving_);
  ooc_stats shown{};
  fill_chunks(shown);
  check.equal("chunks shown as resident", resident - all_leaving, shown.chunks_resident);
  check.equal("chunks shown as leaving", all_leaving, shown.chunks_leaving);
  check.equal("chunks shown as arriving", all_arriving, shown.chunks_arriving);
  check.equal("chunks shown as cached", cached, shown.chunks_cached);
  check.equal("slab chunks shown", backed, shown.chunks_slab + shown.chunks_slab_empty);
  check.equal("slab chunks", backed, heap_backed_);
  check.equal("slab chunks in use", used, heap_used_);
  check.equal("live bytes", live_bytes + small_bytes, stats_.live_bytes);
  check.equal("live bytes of regions", live_bytes, stats_.region_live_bytes);
  check.equal("host bytes", host, host_used());
  return check.text.empty() ? OOC_OK : fail(OOC_INVALID, "audit: " + check.text);
}

}  // namespace ooc
