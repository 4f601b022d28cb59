// Physical chunks: created once through the driver, recycled for ever, never more than the budget allows.
//
// Invariant: created() == free() + chunks that callers hold. A chunk is an index; its driver handle never leaves here.
#pragma once

#include <cstdint>
#include <vector>

#include "driver.h"

namespace ooc {

using Chunk = int32_t;  // index into the pool; negative: none
constexpr Chunk kNoChunk = -1;

class ChunkPool {
 public:
  ChunkPool(const Driver& driver, int device, uint64_t chunk_bytes, uint64_t limit_chunks);

  // Chunks that can be had without taking them from somebody: free ones and those not created yet.
  uint64_t available() const { return free_.size() + (limit_ > created_ ? limit_ - created_ : 0); }
  uint64_t free() const { return free_.size(); }
  uint64_t created() const { return created_; }
  uint64_t limit() const { return limit_; }
  uint64_t configured_limit() const { return configured_limit_; }
  bool lowered() const { return limit_ < configured_limit_; }
  uint64_t created_peak() const { return created_peak_; }
  uint64_t create_calls() const { return create_calls_; }

  // Precondition: count <= available(). False if the driver refuses; then nothing is taken and limit() has shrunk to
  // what the device really has.
  bool take(uint32_t count, Chunk* out);
  // Asks the driver once more where it had lowered the limit. Returns false if it gives no chunk now either.
  bool recover();
  // A chunk beyond a lowered limit goes back to the driver, any other one is kept.
  void give(Chunk chunk);
  // Another limit, at most the one it was made with. Chunks beyond it go back as they are given, free ones by trim().
  void set_limit(uint64_t chunks) { limit_ = configured_limit_ = chunks; }
  void trim();
  // Gives free chunks back to the driver. A limit that it had lowered is tried again.
  void release_free();

  CUmemGenericAllocationHandle handle(Chunk chunk) const { return handles_[static_cast<size_t>(chunk)]; }

 private:
  Chunk create();
  void release(Chunk chunk);

  const Driver& driver_;
  CUmemAllocationProp properties_{};
  uint64_t chunk_bytes_;
  uint64_t limit_, configured_limit_;
  uint64_t created_ = 0;
  uint64_t created_peak_ = 0;
  uint64_t create_calls_ = 0;
  std::vector<CUmemGenericAllocationHandle> handles_;
  std::vector<Chunk> free_;
  std::vector<Chunk> unused_indexes_;
};

}  // namespace ooc
