#include "host_copies.h"

#include <algorithm>
#include <cstring>

#include "audit_check.h"

namespace ooc {

bool HostCopies::reclaim(uint64_t bytes) {
  bool any = false;
  for (Region* region = table_.oldest(); region != nullptr; region = region->newer) {
    if (region->host == nullptr || region->moving > 0 || !region->fully_resident()) continue;
    invalidate(region);
    release(region);
    any = true;
    if (arena_.budget() - arena_.used() >= 2 * bytes) break;
  }
  return any;
}

bool HostCopies::ensure(Region* region, bool may_reclaim) {
  if (region->host != nullptr) return true;
  region->host = arena_.allocate(region->bytes);
  if (region->host == nullptr && may_reclaim && reclaim(region->bytes)) region->host = arena_.allocate(region->bytes);
  if (region->host == nullptr) return false;
  if (wait_for_block(region)) return true;
  arena_.free(region->host, region->bytes);
  region->host = nullptr;
  return false;
}

// Copies out of a block's next variable wait for the copies in of the variable before.
bool HostCopies::wait_for_block(const Region* region) {
  const char* end = region->host + arena_.taken(region->host, region->bytes);
  for (size_t i = 0; i < pending_.size();) {
    Pending& block = pending_[i];
    if (streams_.over(block.after)) {
      block = pending_.back();
      pending_.pop_back();
      continue;
    }
    const bool overlaps = block.start < end && region->host < block.start + block.bytes;
    if (overlaps && !streams_.wait(StreamOrder::kOut, block.after, Edge::kInBeforeHost)) return false;
    ++i;
  }
  return true;
}

void HostCopies::release_block(Region* region) {
  const auto shown = [](const Slot& slot) { return slot.host_mapped; };
  const bool used = std::any_of(region->slots.begin(), region->slots.end(), shown) &&
                    !streams_.host_waits(Streams::users(region), Edge::kUseBeforeUnmap);
  if (used || !hide({region, 0, region->count})) {
    region->leaky = true;  // what its addresses lead to stays there, so they serve nobody else
    for (Slot& slot : region->slots) slot.host_mapped = false;
  }
  Moments reads;
  for (const Moment& moment : Streams::arrival(region, 0, region->count))
    if (moment.stream == StreamOrder::kIn) reads.add(moment);
  if (!streams_.over(reads)) pending_.push_back({region->host, arena_.taken(region->host, region->bytes), reads});
  arena_.free(region->host, region->bytes);
  region->host = nullptr;
}

void HostCopies::validate(const Piece& slots) {
  for (uint32_t i = slots.first; i < slots.end(); ++i) slots.region->slots[i].host_valid = true;
  slots.region->host_valid += slots.count;
}

void HostCopies::invalidate(Region* region) {
  if (region->host_valid == 0) return;
  for (Slot& slot : region->slots) slot.host_valid = false;
  region->host_valid = 0;
}

void HostCopies::forget(Region* region, uint32_t first, uint32_t count) {
  for (uint32_t i = first; i < first + count; ++i) {
    Slot& slot = region->slots[i];
    slot.overwritten |= slot.copied_out();
    if (!slot.host_valid || !slot.has_chunk()) continue;  // without a chunk the host copy is all there is
    slot.host_valid = false;
    --region->host_valid;
  }
}

bool HostCopies::make_mappable(Region* region) {
  if (region->host != nullptr && arena_.is_mappable(region->host)) return true;
  char* block = arena_.allocate_mappable(region->bytes);
  if (block == nullptr) return false;
  for (uint32_t i = 0; i < region->count; ++i) {
    const uint64_t offset = i * geometry_.chunk_bytes, bytes = geometry_.bytes_in(region, i, 1);
    if (region->slots[i].host_valid) std::memcpy(block + offset, region->host + offset, bytes);
  }
  release(region);
  region->host = block;
  return wait_for_block(region);
}

bool HostCopies::show(const Piece& slots) {
  Region* region = slots.region;
  for (uint32_t i = slots.first; i < slots.end();) {
    uint32_t end = i;
    while (end < slots.end() && !region->slots[end].host_mapped) ++end;
    if (end == i) {
      ++i;
      continue;
    }
    char* in_place = geometry_.address(region, i);
    if (device_.map_host(in_place, arena_.chunks(), address(region, i), end - i) != CUDA_SUCCESS) return false;
    for (; i < end; ++i) {
      Slot& slot = region->slots[i];
      slot.host_mapped = true;
      slot.state = SlotState::kSwapped;  // also if it was blank: its bytes are in host memory now, whatever they are
      if (!slot.host_valid) ++region->host_valid;
      slot.host_valid = true;
    }
  }
  return true;
}

bool HostCopies::hide(const Piece& slots) {
  Region* region = slots.region;
  for (uint32_t i = slots.first; i < slots.end();) {
    uint32_t end = i;
    while (end < slots.end() && region->slots[end].host_mapped) ++end;
    if (end == i) {
      ++i;
      continue;
    }
    if (device_.unmap(geometry_.address(region, i), (end - i) * geometry_.chunk_bytes) != CUDA_SUCCESS) return false;
    for (; i < end; ++i) region->slots[i].host_mapped = false;
  }
  return true;
}

void HostCopies::fill(ooc_stats& stats) const {
  stats.host_budget_bytes = asked_bytes_;
  stats.host_bytes = stats.host_peak_bytes = arena_.committed();
  stats.host_used_bytes = arena_.used();
  stats.host_unpinned_bytes = arena_.unpinned();
}

std::string HostCopies::audit() const {
  AuditCheck check;
  uint64_t blocks = 0;
  for (const Region& region : table_.all()) {
    blocks += region.host != nullptr ? arena_.taken(region.host, region.bytes) : 0;
    uint64_t valid = 0;
    for (const Slot& slot : region.slots) {
      valid += slot.host_valid ? 1 : 0;
      check.none("slots that show a host copy and should not",
                 slot.host_mapped && (slot.resident() || !(region.live || region.doomed)));
      if (!region.live) continue;
      check.none("slots in neither place", !slot.has_chunk() && !slot.host_valid && !slot.blank());
      check.none("blank slots with bytes", slot.blank() && (slot.host_valid || slot.has_chunk()));
      check.none("slots kept in host memory and not there", slot.kept > 0 && (slot.has_chunk() || !slot.host_mapped));
    }
    if (region.live) check.equal("valid host slots of a region", valid, region.host_valid);
  }
  check.equal("host bytes", blocks, arena_.used());
  return check.text();
}

}  // namespace ooc
