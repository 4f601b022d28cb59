#include "host_copies.h"

namespace ooc {

void HostCopies::fill(ooc_stats& stats) const {
  if (file_) {
    const HostArena& space = tiered_ ? *space_ : arena_;
    stats.disk_budget_bytes = space.budget();
    stats.disk_bytes = stats.disk_peak_bytes = space.committed();
    stats.disk_used_bytes = space.used();
    stats.disk_read_bytes = file_->read_bytes();
    stats.disk_written_bytes = file_->written_bytes();
    stats.disk_failure_count = file_->failures();
    stats.disk_read_seconds = read_seconds_;
    stats.disk_write_seconds = write_seconds_;
  }
  if (direct()) return;
  stats.host_budget_bytes = asked_bytes_;
  stats.host_bytes = stats.host_peak_bytes = arena_.committed();
  stats.host_used_bytes = arena_.used();
  stats.host_unpinned_bytes = arena_.unpinned();
}

std::string HostCopies::audit() const {
  AuditCheck check;
  uint64_t blocks = 0, below = 0;
  for (const Region& region : table_.all()) {
    blocks += region.host != nullptr ? arena_.taken(region.host, region.bytes) : 0;
    below += region.below != nullptr ? space_->taken(region.below, region.bytes) : 0;
    uint64_t valid = 0;
    for (const Slot& slot : region.slots) {
      valid += slot.host_valid ? 1 : 0;
      check.none("slots that show a host copy and should not",
                 slot.host_mapped && (slot.resident() || !(region.live || region.doomed)));
      if (!region.live) continue;
      check.none("valid copies nowhere", slot.host_valid && region.host == nullptr && !region.below_valid && region.shift == nullptr);
      check.none("slots in neither place", !slot.has_chunk() && !slot.host_valid && !slot.blank());
      check.none("blank slots with bytes", slot.blank() && (slot.host_valid || slot.has_chunk()));
      check.none("slots kept in host memory and not there", slot.kept > 0 && (slot.has_chunk() || !slot.host_mapped));
    }
    if (region.live) check.equal("valid host slots of a region", valid, region.host_valid);
  }
  if (shifts_.empty()) {  // else one of them has blocks that no region has
    check.equal("host bytes", blocks, arena_.used());
    check.equal("bytes below host memory", below, tiered_ ? space_->used() : 0);
  }
  return check.text();
}

}  // namespace ooc
