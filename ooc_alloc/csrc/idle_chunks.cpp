#include "idle_chunks.h"

namespace ooc {

bool IdleChunks::reclaim(uint64_t wanted) {
  while (pool_.available() < wanted) {
    Region* region = table_.oldest_cached();
    if (region == nullptr) {
      if (!slabs_.reclaim_one()) return false;
      continue;
    }
    table_.uncache(region);
    if (mappings_.destroy(region)) continue;
    table_.cache(region);
    return false;
  }
  return true;
}

}  // namespace ooc
