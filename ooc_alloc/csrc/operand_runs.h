// The operands of a function that uses ranges of variables, put together to runs of slots that do not overlap, each
// used in one way.
#pragma once

#include <cstdint>
#include <vector>

#include "geometry.h"
#include "ooc_alloc.h"
#include "region_table.h"

namespace ooc {

// `serial` is the function's. A run of all slots of a variable has their count, not 0.
std::vector<Hold> runs_of(const Geometry& geometry, RegionTable& table, uint64_t serial, const ooc_operand* operands,
                          uint32_t count);

}  // namespace ooc
