// How the core's addresses divide into chunks: those of regions come first, those of slabs follow.
#pragma once

#include <algorithm>
#include <cstdint>

#include "device.h"
#include "divisor.h"
#include "ooc_alloc.h"
#include "region.h"

namespace ooc {

struct Geometry {
  // Reserves the addresses. Throws std::runtime_error: a number of the configuration is impossible, and which.
  Geometry(const ooc_config& config, Device& device);

  uint64_t chunk_bytes = 0;
  uint64_t region_chunks = 0;  // addresses of regions
  uint64_t slab_chunks = 0;    // addresses of slabs
  uint64_t piece_chunks = 0;   // the longest single copy
  uint64_t budget_bytes = 0;   // as it was when the core was made
  char* base = nullptr;
  uint64_t reserved_bytes = 0;
  Divisor chunk_of;  // by chunk_bytes

  uint64_t offset(const void* address) const { return static_cast<uint64_t>(static_cast<const char*>(address) - base); }
  bool owns(const void* address) const { return offset(address) < reserved_bytes; }
  bool in_slabs(const void* address) const { return address >= this->address(region_chunks) && owns(address); }
  char* address(uint64_t chunk) const { return base + chunk * chunk_bytes; }
  char* address(const Region* region, uint32_t slot = 0) const { return address(region->first + slot); }
  uint64_t chunks_for(uint64_t bytes) const { return chunk_of(bytes + chunk_bytes - 1); }
  // Bytes of a variable in some of its slots; the last slot may be used in part.
  uint64_t bytes_in(const Region* region, uint32_t first, uint32_t count) const {
    return std::min(region->bytes, (first + count) * chunk_bytes) - first * chunk_bytes;
  }
};

}  // namespace ooc
