// How much the program has allocated: calls, and the most bytes at once. Guarded by the core's lock.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "audit_check.h"
#include "ooc_alloc.h"

namespace ooc {

class Allocations {
 public:
  explicit Allocations(uint64_t chunk_bytes) : chunk_bytes_(chunk_bytes) {}

  // What there is after an allocation: requested bytes, the chunks of regions behind them, and those of slabs in use.
  void allocated(uint64_t live_bytes, uint64_t region_chunks, uint64_t slab_chunks) {
    ++allocations_;
    iteration_live_peak_ = std::max(iteration_live_peak_, live_bytes);
    iteration_slab_peak_ = std::max(iteration_slab_peak_, slab_chunks);
    fit_chunks_ = std::max(fit_chunks_, slab_chunks + std::max(region_chunks, slab_chunks));  // slabs get at most half
    if (live_bytes <= live_peak_) return;
    live_peak_ = live_bytes;
    waste_at_live_peak_ = (region_chunks + slab_chunks) * chunk_bytes_ - live_bytes;
  }
  void freed() { ++frees_; }
  // The peaks within an iteration; the next one begins with what there is.
  void end_iteration(uint64_t live_bytes, uint64_t slab_chunks, ooc_iteration* ended) {
    ended->live_peak_bytes = iteration_live_peak_;
    ended->slab_peak_bytes = iteration_slab_peak_ * chunk_bytes_;
    iteration_live_peak_ = live_bytes;
    iteration_slab_peak_ = slab_chunks;
  }
  // Whether the peaks are at least what there is. Empty if they are.
  std::string audit(uint64_t live_bytes) const {
    AuditCheck check;
    check.none("live bytes beyond their peak", live_bytes > live_peak_);
    check.none("live bytes beyond the iteration's peak", live_bytes > iteration_live_peak_);
    return check.text();
  }
  void fill(ooc_stats& stats) const {
    stats.allocations = allocations_;
    stats.frees = frees_;
    stats.live_peak_bytes = live_peak_;
    stats.fit_budget_bytes = fit_chunks_ * chunk_bytes_;
    stats.waste_at_live_peak_bytes = waste_at_live_peak_;
  }

 private:
  const uint64_t chunk_bytes_;
  uint64_t allocations_ = 0, frees_ = 0;
  uint64_t live_peak_ = 0, waste_at_live_peak_ = 0;
  uint64_t fit_chunks_ = 0;  // of a budget in which nothing would have moved
  uint64_t iteration_live_peak_ = 0;
  uint64_t iteration_slab_peak_ = 0;  // chunks
};

}  // namespace ooc
