#include "geometry.h"

#include <stdexcept>
#include <string>

namespace ooc {
namespace {

constexpr uint64_t kSlabBytes = uint64_t{16} << 30;    // addresses, not memory
constexpr uint64_t kDefaultSpace = uint64_t{1} << 40;  // the same
constexpr uint64_t kDefaultPiece = uint64_t{4} << 20;

}  // namespace

Geometry::Geometry(const ooc_config& config, Device& device) {
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

}  // namespace ooc
