// What ooc_core_read_stats gives: counters that the parts keep anyhow, put together while somebody asks; and the audit,
// which recounts them.
#include <algorithm>
#include <string>
#include <vector>

#include "audit_check.h"
#include "core.h"
#include "last_error.h"

namespace ooc {

namespace {

void fill_failures(ooc_stats& s, const Driver& driver) {
  s.driver_failures_mem_create = driver.failures(Counted::kMemCreate);
  s.driver_failures_mem_map = driver.failures(Counted::kMemMap);
  s.driver_failures_mem_set_access = driver.failures(Counted::kMemSetAccess);
  s.driver_failures_mem_unmap = driver.failures(Counted::kMemUnmap);
  s.driver_failures_copy_out = driver.failures(Counted::kCopyOut);
  s.driver_failures_copy_in = driver.failures(Counted::kCopyIn);
  s.driver_failures_host_register = driver.failures(Counted::kHostRegister);
  s.driver_failures_event_create = driver.failures(Counted::kEventCreate);
  s.driver_failures_event_record = driver.failures(Counted::kEventRecord);
  s.driver_failures_event_synchronize = driver.failures(Counted::kEventSynchronize);
  s.driver_failures_stream_synchronize = driver.failures(Counted::kStreamSynchronize);
  s.driver_failures_stream_wait_event = driver.failures(Counted::kStreamWaitEvent);
  s.driver_failure_count = driver.failures();
}

}  // namespace

// No walk: what is held and by nobody that is counted is on its way in, or is being handed over.
void Core::fill_chunks(ooc_stats& s) const {
  const uint64_t created = pool_.created() - pool_.free(), lost = mappings_.lost_chunks();
  const uint64_t cached = table_.cached_chunks(), resident = table_.resident_chunks(), moving = transitions_.moving();
  const uint64_t held = created - std::min(lost, created);
  const uint64_t placed = std::min(held, cached + resident);
  // Some chunks of slabs may be counted already and not be backed yet.
  const uint64_t backed = std::min(slabs_.backed(), held - placed);
  s.chunks_arriving = held - placed - backed;
  s.chunks_leaving = std::min(resident, moving - std::min(moving, s.chunks_arriving));
  s.chunks_resident = placed - std::min(placed, cached) - s.chunks_leaving;
  s.chunks_cached = std::min(placed, cached);
  s.chunks_free = pool_.free();
  s.chunks_slab = std::min(slabs_.used(), backed);
  s.chunks_slab_empty = backed - s.chunks_slab;
  s.chunks_lost = lost;
}

void Core::read_stats(ooc_stats* stats) {
  const RelaxedCaptures relaxed(streams_.capturable());
  const Lock lock(mutex_);
  streams_.collect_times();
  ooc_stats& s = *stats;
  s = transitions_.counted();
  s.version = OOC_ABI_VERSION;
  s.struct_bytes = sizeof s;
  s.chunk_bytes = geometry_.chunk_bytes;
  s.budget_bytes = budget_bytes_;
  s.device_total_bytes = device_.total_bytes();
  s.device_bytes = pool_.created() * geometry_.chunk_bytes;
  s.device_peak_bytes = pool_.created_peak() * geometry_.chunk_bytes;
  s.free_bytes = pool_.free() * geometry_.chunk_bytes;
  s.live_bytes = table_.live_bytes() + slabs_.live_bytes();
  s.waste_bytes = (table_.live_chunks() + slabs_.used()) * geometry_.chunk_bytes - s.live_bytes;
  s.driver_calls_map = device_.calls().map;
  s.driver_calls_unmap = device_.calls().unmap;
  s.driver_calls_set_access = device_.calls().set_access;
  s.unmapped_bytes = device_.calls().unmapped_bytes;
  s.map_seconds = device_.calls().map_seconds;
  s.unmap_seconds = device_.calls().unmap_seconds;
  s.driver_calls_create = pool_.create_calls();
  s.event_create_count = streams_.events_created();
  const Scheduler::Counts planned = scheduler_ != nullptr ? scheduler_->counts() : scheduler_counts_;
  s.plan_count = planned.plans;
  s.plan_switch_count = planned.switches;
  s.divergence_count = planned.divergences;
  table_.fill(s);
  slabs_.fill(s);
  host_.fill(s);
  s.stall_disk_seconds = disk_stall_seconds_;
  holds_.fill(s);
  allocations_.fill(s);
  iterations_.fill(s);
  fill_failures(s, device_.driver());
  fill_chunks(s);
}

// ---- a second route to the counters: every part recounts what it keeps, and the chunks of all are added up here -----

std::string Core::audit_chunks() const {
  AuditCheck check;
  std::vector<bool> taken;
  uint64_t chunks = 0, duplicates = 0, leaving = 0, arriving = 0;
  const auto hold_chunk = [&](Chunk chunk) {
    const auto index = static_cast<size_t>(chunk);
    if (taken.size() <= index) taken.resize(index + 1);
    duplicates += taken[index] ? 1 : 0;
    taken[index] = true;
    ++chunks;
  };
  for (const Region& region : table_.all())
    for (const Slot& slot : region.slots) {
      if (slot.has_chunk()) hold_chunk(slot.chunk);
      leaving += slot.copied_out() ? 1 : 0;
      arriving += slot.arriving() ? 1 : 0;
    }
  slabs_.each_held(hold_chunk);
  check.equal("chunks", chunks + pool_.free() + mappings_.lost_chunks(), pool_.created());
  check.equal("chunks held twice", duplicates, 0);
  ooc_stats shown{};
  fill_chunks(shown);
  check.equal("chunks shown as resident", table_.resident_chunks() - leaving, shown.chunks_resident);
  check.equal("chunks shown as leaving", leaving, shown.chunks_leaving);
  check.equal("chunks shown as arriving", arriving, shown.chunks_arriving);
  check.equal("chunks shown as cached", table_.cached_chunks(), shown.chunks_cached);
  check.equal("slab chunks shown", slabs_.backed(), shown.chunks_slab + shown.chunks_slab_empty);
  return check.text();
}

int Core::audit() {
  const Lock lock(mutex_);
  if (detached_) return OOC_OK;
  const std::string text = audit_chunks() + streams_.audit() + table_.audit() + mappings_.audit() + slabs_.audit() +
                           host_.audit() + holds_.audit(threads_, table_) + iterations_.audit() + transitions_.audit() +
                           allocations_.audit(table_.live_bytes() + slabs_.live_bytes());
  return text.empty() ? OOC_OK : fail(OOC_INVALID, "audit: " + text);
}

}  // namespace ooc
