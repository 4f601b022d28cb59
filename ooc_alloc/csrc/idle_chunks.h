// Chunks that nobody needs: free ones, those of cached regions, and those under no small block. They are room that can
// be had without moving a variable. Guarded by the core's lock.
#pragma once

#include <cstdint>

#include "chunk_pool.h"
#include "mappings.h"
#include "region_table.h"
#include "slabs.h"

namespace ooc {

class IdleChunks {
 public:
  IdleChunks(ChunkPool& pool, RegionTable& table, Mappings& mappings, Slabs& slabs)
      : pool_(pool), table_(table), mappings_(mappings), slabs_(slabs) {}

  uint64_t count() const { return pool_.available() + table_.cached_chunks() + slabs_.unused(); }
  // Takes that many. Returns false if there are fewer, or the driver refuses; then none is taken.
  bool take(uint32_t count, Chunk* chunks) { return reclaim(count) && pool_.take(count, chunks); }
  // Makes cached ones free until the pool has that many. Returns false if it has fewer in the end.
  bool reclaim(uint64_t wanted) {
    while (pool_.available() < wanted) {
      Region* region = table_.take_oldest_cached();
      if (region == nullptr) {
        if (!slabs_.reclaim_one()) return false;
        continue;
      }
      if (mappings_.destroy(region)) continue;
      table_.cache(region);
      return false;
    }
    return true;
  }
  void reclaim_all() { reclaim(~uint64_t{0} >> 1); }

 private:
  ChunkPool& pool_;
  RegionTable& table_;
  Mappings& mappings_;
  Slabs& slabs_;
};

}  // namespace ooc
