// A copy of consecutive slots that was enqueued and not yet settled.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>

#include "device.h"
#include "disk_queue.h"
#include "region.h"
#include "timeline.h"

namespace ooc {

using Lock = std::unique_lock<std::mutex>;  // of the core's mutex

struct Transfer {
  Region* region = nullptr;
  uint32_t first = 0, count = 0;
  Direction direction = Direction::kOut;
  double started = 0;
  bool failed = false;      // the driver refused a part of it, or nothing was enqueued
  CUevent event = nullptr;  // where functions run on the host: after the copy
  std::shared_ptr<DiskTransfer> disk{};  // to or from a disk: the copy
  Moment moment{};          // where functions run on streams: when the copy is done
  uint64_t watched = Timeline::kNoEvent;

  Piece slots() const { return {region, first, count}; }
};

}  // namespace ooc
