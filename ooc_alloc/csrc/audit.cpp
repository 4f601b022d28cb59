// A second route to the counters: every part recounts what it keeps, and the chunks of all are added up here.
#include <string>
#include <vector>

#include "audit_check.h"
#include "core.h"
#include "last_error.h"

namespace ooc {

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
