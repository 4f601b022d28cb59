// Private pools: torch.cuda.MemPool, and the memory that a CUDA graph was captured with.
//
// A graph's kernels have addresses in them, so what was allocated for it keeps its memory, on the device, whether a tensor
// still has it or not, until the last graph (or MemPool) lets go of the pool. A freed block is given to the pool's next
// allocation of about its size on the same stream, as the order within the pool's streams is the same in every replay.
//
// Thread-safe. Blocks are obtained and given back by the allocator (cuda_allocator.cpp); this only knows whose they are.
#pragma once

#include <c10/cuda/CUDACachingAllocator.h>

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_set>
#include <utility>
#include <vector>

#include "cuda_ledger.h"

namespace ooc_torch __attribute__((visibility("hidden"))) {

using PoolId = c10::MempoolId_t;
using Source = std::shared_ptr<native::CUDAAllocator>;  // where a pool's memory comes from; null: the core

class Pools {
 public:
  using Filter = std::function<bool(cudaStream_t)>;

  struct PoolBlock {
    size_t bytes = 0;
    void* stream = nullptr;
    bool live = false;
    bool shared = false;  // other streams used it, so it is not given out again
  };
  // A state that a pool can be brought back to.
  struct State final : native::AllocatorState {
    PoolId id;
    std::vector<std::pair<void*, PoolBlock>> live;
  };
  struct Discarded {
    void* address;
    Source source;
  };

  // From begin() to end(), allocations on streams that the filter accepts come from the pool, which has one user more.
  void begin(PoolId id, Filter filter);
  void end(PoolId id);
  // Returns whether any pool is between begin() and end(). It takes no lock.
  bool active() const { return active_count_.load(std::memory_order_relaxed) > 0; }
  std::optional<PoolId> pool_for(cudaStream_t stream);

  void add_user(PoolId id, Source source);
  // Takes a user away. When the last one goes, it returns the blocks that nobody has, which the caller gives back.
  std::vector<Discarded> drop_user(PoolId id);
  int users(PoolId id) const;
  void use_on_out_of_memory(PoolId id, bool use);
  Source source(PoolId id) const;

  // Makes an idle block of about this size live and returns it, or null if there is none. `bytes` becomes its size.
  void* take(PoolId id, size_t& bytes, void* stream);
  void add(PoolId id, void* address, size_t bytes, void* stream);
  void share(PoolId id, void* address);
  // Makes a live block idle. If its pool has no users left, it returns the block, which the caller gives back.
  std::optional<Discarded> give(PoolId id, void* address);

  bool live_are(PoolId id, const std::unordered_set<void*>& expected) const;
  std::shared_ptr<State> state(PoolId id) const;
  // Makes exactly the state's blocks live. Returns those that were live before, and those that are now.
  std::pair<std::vector<void*>, std::vector<std::pair<void*, PoolBlock>>> restore(const State& state);

  std::vector<IdleBlock> idle() const;
  // Takes the idle blocks from pools that may be used when nothing else is left. They are the caller's from now on.
  std::vector<Discarded> last_resort();

 private:
  struct Pool {
    int users = 0;
    bool use_on_oom = false;
    Source source;
    std::map<void*, PoolBlock> blocks;
  };
  std::vector<Discarded> take_idle(Pool& pool);
  Pool* find(PoolId id);
  const Pool* find(PoolId id) const { return const_cast<Pools*>(this)->find(id); }

  mutable std::mutex mutex_;
  std::map<PoolId, Pool> pools_;
  std::vector<std::pair<PoolId, Filter>> filters_;
  std::atomic<int> active_count_{0};
};

}  // namespace ooc_torch
