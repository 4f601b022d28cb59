// Host-backed memory (option host_backed): the address of a swapped slot leads to its host copy, so that an access that no
// function announced is slow and right, where it would end the process. docs/decisions/0004-host-backed-memory.md.
//
// One address leads to one memory at a time, and the driver has no call that changes it in one step: for some microseconds
// between unmapping and mapping it leads to nothing. All of this is done with the lock held, and after waiting for what is
// enqueued; so a chunk that has left its address is used by nobody.
#include "core.h"

namespace ooc {

void Core::show_host_copy(Region* region, uint32_t first, uint32_t count) {
  if (!host_chunks_ || region->host == nullptr) return;
  const char* host = region->host + first * chunk_bytes_;
  // Refused: the address leads to nothing, as it does without the option.
  if (device_.map_host(address_of(region->first + first), *host_chunks_, host, count) != CUDA_SUCCESS) return;
  for (uint32_t i = first; i < first + count; ++i) region->slots[i].host_mapped = true;
}

bool Core::hide_host_copy(Region* region, uint32_t first, uint32_t count) {
  for (uint32_t i = first; i < first + count;) {
    uint32_t end = i;
    while (end < first + count && region->slots[end].host_mapped) ++end;
    if (end == i) {
      ++i;
      continue;
    }
    if (device_.unmap(address_of(region->first + i), (end - i) * chunk_bytes_) != CUDA_SUCCESS) return false;
    for (; i < end; ++i) region->slots[i].host_mapped = false;
  }
  return true;
}

// False: the chunks are free again, and the bytes are in the host copy as before.
bool Core::take_place(Region* region, uint32_t first, uint32_t count, bool copied) {
  if (order_) order_->synchronize(arrival_of(region, first, count), Edge::kUseBeforeUnmap);
  std::vector<Chunk> chunks;
  for (uint32_t i = first; i < first + count; ++i) chunks.push_back(region->slots[i].chunk);
  char* address = address_of(region->first + first);
  const bool usable = !order_ || !device_.lost();
  const bool mirror_gone = usable && device_.unmap(device_.mirrored(address), count * chunk_bytes_) == CUDA_SUCCESS;
  if (copied && mirror_gone && !region->doomed && hide_host_copy(region, first, count)) {
    if (device_.map(address, chunks.data(), count, *pool_, chunk_bytes_) == CUDA_SUCCESS) return true;
    show_host_copy(region, first, count);
  }
  for (uint32_t i = first; i < first + count; ++i) {
    if (mirror_gone) pool_->give(region->slots[i].chunk);
    else ++lost_chunks_;  // still mapped in the mirror, where the next map sees to it
    region->slots[i].chunk = kNoChunk;
    region->slots[i].arriving = false;
  }
  return false;
}

}  // namespace ooc
