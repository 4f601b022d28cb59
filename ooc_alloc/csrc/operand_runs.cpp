#include "operand_runs.h"

#include <algorithm>

namespace ooc {
namespace {

// Where a range begins (+1) or ends (-1), in slots of the group-th variable of the function.
struct Limit {
  uint32_t group, slot;
  int ranges, reads, writes;
};

}  // namespace

// A sweep along each variable. Two ranges of it may overlap, touch or be the same: what one of them writes is written,
// and where the access changes, a new run begins.
std::vector<Hold> runs_of(const Geometry& geometry, RegionTable& table, uint64_t serial, const ooc_operand* operands,
                          uint32_t count) {
  std::vector<Region*> regions;  // by first operand
  std::vector<Limit> limits;
  for (uint32_t i = 0; i < count; ++i) {
    Region* region = table.find(operands[i].address);
    if (region == nullptr) continue;
    if (region->use_serial != serial) {
      region->use_serial = serial;
      region->group = static_cast<uint32_t>(regions.size());
      regions.push_back(region);
    }
    const uint64_t offset = geometry.offset(operands[i].address) - region->first * geometry.chunk_bytes;
    const uint64_t bytes = std::min(operands[i].bytes, region->count * geometry.chunk_bytes - offset);
    const bool whole = operands[i].bytes == 0;
    const auto first = whole ? 0 : static_cast<uint32_t>(geometry.chunk_of(offset));
    const auto end = whole ? region->count : static_cast<uint32_t>(geometry.chunks_for(offset + bytes));
    const int reads = operands[i].access & OOC_READ ? 1 : 0, writes = operands[i].access & OOC_WRITE ? 1 : 0;
    limits.push_back({region->group, first, 1, reads, writes});
    limits.push_back({region->group, end, -1, -reads, -writes});
  }
  std::sort(limits.begin(), limits.end(), [](const Limit& a, const Limit& b) {
    return a.group != b.group ? a.group < b.group : a.slot < b.slot;
  });
  std::vector<Hold> runs;
  int ranges = 0, reads = 0, writes = 0;
  for (size_t i = 0; i < limits.size(); ++i) {
    if (ranges > 0 && limits[i].slot > limits[i - 1].slot) {  // at the next variable none is open
      Region* region = regions[limits[i].group];
      Hold run{{region, region->generation}};
      run.first = limits[i - 1].slot;
      run.count = limits[i].slot - run.first;
      run.reads = reads > 0;
      run.writes = writes > 0;
      Hold* last = runs.empty() || runs.back().region != region ? nullptr : &runs.back();
      const bool continues = last != nullptr && last->first + last->count == run.first && last->reads == run.reads &&
                             last->writes == run.writes;
      if (continues) last->count += run.count;
      else runs.push_back(run);
    }
    ranges += limits[i].ranges;
    reads += limits[i].reads;
    writes += limits[i].writes;
  }
  return runs;
}

}  // namespace ooc
