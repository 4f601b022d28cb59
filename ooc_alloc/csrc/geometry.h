// How the core's addresses divide into chunks: those of regions come first, those of slabs follow.
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "device.h"
#include "divisor.h"
#include "ooc_alloc.h"
#include "region.h"

namespace ooc {

struct Geometry {
  // Reserves the addresses. Throws std::runtime_error: a number of the configuration is impossible, and which.
  Geometry(const ooc_config& config, Device& device) {
    constexpr uint64_t kSlabBytes = uint64_t{16} << 30;    // addresses, not memory
    constexpr uint64_t kDefaultSpace = uint64_t{1} << 40;  // the same
    constexpr uint64_t kDefaultPiece = uint64_t{4} << 20;
    const uint64_t granularity = device.granularity();
    const uint64_t wanted = std::max<uint64_t>(config.chunk_bytes, 1);
    chunk_bytes = (wanted + granularity - 1) / granularity * granularity;
    budget_bytes = config.budget_bytes != 0 ? config.budget_bytes : device.free_bytes() / 10 * 9;
    if (budget_bytes < chunk_bytes)
      throw std::runtime_error("a budget of " + std::to_string(budget_bytes) + " bytes holds no chunk of " +
                               std::to_string(chunk_bytes) + " bytes; raise OOC_BUDGET or lower OOC_CHUNK_SIZE");
    if (budget_bytes > device.total_bytes())
      throw std::runtime_error("the budget of " + std::to_string(budget_bytes) + " bytes is more than the device has (" +
                               std::to_string(device.total_bytes()) + " bytes); lower OOC_BUDGET");
    const uint64_t piece = config.copy_piece_bytes != 0 ? config.copy_piece_bytes : kDefaultPiece;
    piece_chunks = std::max<uint64_t>(1, piece / chunk_bytes);
    slab_chunks = kSlabBytes / chunk_bytes;
    const uint64_t space = config.address_space_bytes != 0 ? config.address_space_bytes : kDefaultSpace;
    region_chunks = std::max<uint64_t>(space / chunk_bytes, 1);
    chunk_of = Divisor(chunk_bytes);
    device.reserve((region_chunks + slab_chunks) * chunk_bytes);
    base = device.base();
    reserved_bytes = device.reserved();
  }

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
